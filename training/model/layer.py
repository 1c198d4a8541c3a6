"""One layer: a mixer over tokens, then an MLP, each on the residual stream."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.training.config.layers import LayerConfig
from gristmill.training.config.layout import SWAPS, LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import NO_HOOK, AttentionMetadata, LayerHook
from gristmill.training.model.layer_hook import RecomputedLayer, RecomputedMixer, RecomputedOperators, SwapHook
from gristmill.training.model.modules import MLPS, Norm
from gristmill.training.model.moe.mixture import MixtureOfExperts
from gristmill.training.parallel.offload.swap import SwapStreams
from gristmill.training.parallel.tensor import TensorAxis

# B batch, T tokens (this tensor rank's, under sequence parallelism), D width


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or one of them alone. norm_order "post": norm(x + mixer(x)); "output":
    x + norm(mixer(x)); "sandwich": x + output_norm(mixer(norm(x))). Parallel: x + mixer(norm(x)) + mlp(norm(x)).

    hook: stands around what the layer computes; `build_hook` makes that of a layout. expert_tensor: ranks that share an
    expert's hidden width, where the MLP is a mixture."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        tensor: TensorAxis,
        hook: LayerHook = NO_HOOK,
        expert_tensor: int = 1,
    ):
        super().__init__()
        layer: LayerConfig = config.layer(index)
        self.index, self.norm_order, self.hook = index, layer.norm_order, hook
        self.is_last = index == config.layers - 1
        self.parallel, self.scale = config.parallel_residual, config.scales.residual
        self.has_experts = layer.experts > 0
        self.mixer: nn.Module | None = None
        self.mlp: nn.Module | None = None
        self.mixer_norm: Norm | None = None
        self.mlp_norm: Norm | None = None
        self.mixer_output_norm: Norm | None = None
        self.mlp_output_norm: Norm | None = None
        if layer.mixer != "none":
            self.mixer_norm = Norm(config, tensor, config.width)
            self.mixer = build_mixer(config, layer, tensor)
            if layer.norm_order == "sandwich":
                self.mixer_output_norm = Norm(config, tensor, config.width)
        if layer.mlp == "none":
            return
        if config.parallel_residual != "one_norm":
            self.mlp_norm = Norm(config, tensor, config.width)
        if layer.norm_order == "sandwich":
            self.mlp_output_norm = Norm(config, tensor, config.width)
        if self.has_experts:
            self.mlp = MixtureOfExperts(config, index, tensor, expert_tensor)
        else:
            self.mlp = MLPS[layer.mlp](config, tensor, layer.ffn_hidden_size)

    def forward(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        """The stream after this layer, and the mixer's state if the metadata keeps it."""
        x_BTD, state = self.hook.around_layer(self.compute, x_BTD, metadata, state)
        if isinstance(self.mlp, MixtureOfExperts) and torch.is_grad_enabled():
            self.mlp.router.add_pass_counts()  # here, where recomputation does not count twice
        return x_BTD, state

    def compute(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any = None) -> tuple[Tensor, Any]:
        """The layer without the hook around it; `train.compile` compiles this."""
        if self.parallel:
            x_BTD, state = self._compute_in_parallel(x_BTD, metadata, state)
            return self._wanted(x_BTD, metadata), state
        if self.mixer is not None:
            change_BTD, state = self.hook.around_mixer(self._mix, x_BTD, metadata, state)
            change_BTD = self._normed_output(change_BTD, self.mixer_norm, self.mixer_output_norm)
            x_BTD = self._add(x_BTD, metadata.drop(change_BTD, self.index, site=0), self.mixer_norm)
        x_BTD = self._wanted(x_BTD, metadata)
        if self.mlp is not None:
            change_BTD = self._apply_mlp(self._normed_input(x_BTD, self.mlp_norm), metadata)
            change_BTD = self._normed_output(change_BTD, self.mlp_norm, self.mlp_output_norm)
            x_BTD = self._add(x_BTD, metadata.drop(change_BTD, self.index, site=1), self.mlp_norm)
        return x_BTD, state

    def _compute_in_parallel(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any) -> tuple[Tensor, Any]:
        assert self.mixer is not None and self.mixer_norm is not None
        if self.mlp_norm is None:  # one norm, computed once
            normed_BTD = mlp_input_BTD = self.mixer_norm(x_BTD)
            mixed_BTD, state = self.hook.around_mixer(self.mixer, normed_BTD, metadata, state)
        else:
            mlp_input_BTD = self.mlp_norm(x_BTD)
            mixed_BTD, state = self.hook.around_mixer(self._mix, x_BTD, metadata, state)
        mlp_BTD = self._apply_mlp(mlp_input_BTD, metadata)
        change_BTD = metadata.drop(mixed_BTD, self.index, site=0) + metadata.drop(mlp_BTD, self.index, site=1)
        return self._add(x_BTD, change_BTD, None), state

    def _mix(self, x_BTD: Tensor, metadata: AttentionMetadata, state: Any) -> tuple[Tensor, Any]:
        assert self.mixer is not None
        return self.mixer(self._normed_input(x_BTD, self.mixer_norm), metadata, state)

    def _apply_mlp(self, x_BTD: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert self.mlp is not None
        return self.mlp(x_BTD, metadata.routing, metadata.mix) if self.has_experts else self.mlp(x_BTD)

    def _normed_input(self, x_BTD: Tensor, norm: Norm | None) -> Tensor:
        return norm(x_BTD) if norm is not None and self.norm_order in ("pre", "sandwich") else x_BTD

    def _normed_output(self, change_BTD: Tensor, norm: Norm | None, output_norm: Norm | None) -> Tensor:
        if output_norm is not None:
            return output_norm(change_BTD)
        return norm(change_BTD) if norm is not None and self.norm_order == "output" else change_BTD

    def _add(self, x_BTD: Tensor, change_BTD: Tensor, norm: Norm | None) -> Tensor:
        if self.scale != 1:
            change_BTD = change_BTD * self.scale
        return norm(x_BTD + change_BTD) if norm is not None and self.norm_order == "post" else x_BTD + change_BTD

    def _wanted(self, x_BTD: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Selects the wanted tokens in the last layer, [1, N, D]: behind its mixer no token reads another."""
        if metadata.wanted_N is None or not self.is_last:
            return x_BTD
        return x_BTD.flatten(0, 1)[metadata.wanted_N].unsqueeze(0)


# The parts of a layer that its configuration names: the mixer's torch module and the hook.


def build_mixer(config: ModelConfig, layer: LayerConfig, tensor: TensorAxis) -> nn.Module:
    """The module that the layer's mixer names, whose parameters must be those that it declares."""
    mixer = config.mixer_named(layer.mixer, layer)
    file, name = mixer.module.split(":")
    built = getattr(importlib.import_module(file), name)(config, mixer, tensor)
    built_shapes = {path: tuple(parameter.shape) for path, parameter in built.named_parameters()}
    declared_shapes = {parameter.name: parameter.shape for parameter in mixer.parameters(config.width)}
    if built_shapes != declared_shapes:
        differ = sorted(set(built_shapes.items()) ^ set(declared_shapes.items()))
        raise TypeError(f"mixer {layer.mixer} declares other parameters than its module {mixer.module} has: {differ}")
    return built


RECOMPUTATIONS = {"full": RecomputedLayer, "operators": RecomputedOperators, "attention": RecomputedMixer}


def build_hook(layout: LayoutConfig, index: int, layers: int, swap: SwapStreams | None) -> LayerHook:
    """The hook of layer `index` of so many in the whole model. swap: streams of the model's swaps, where there are
    some."""
    if layout.recompute == "none" or index % layout.recompute_every:
        return NO_HOOK
    if layout.recompute not in SWAPS:
        return RECOMPUTATIONS[layout.recompute]()
    if index >= layers - layout.num_layers_on_device:
        return NO_HOOK
    share = 1.0 if layout.recompute == "swap" else layout.offloaded_token_fraction
    assert share is not None and swap is not None, "the planner chooses it before the model is built"
    return SwapHook(share, swap)
