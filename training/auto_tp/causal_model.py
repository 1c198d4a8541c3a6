"""A causal language model of transformers in the place of our own: forward, loss, tensor parallelism and FSDP."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from gristmill.training.auto_tp.apply import apply_plan
from gristmill.training.auto_tp.plan import TensorPlan
from gristmill.training.auto_tp.region import ShardedRegion
from gristmill.training.engine.fsdp import sum_gradients
from gristmill.training.loss import Scoring, token_log_probs, upcast, upcast_dtype
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.parallel.precision import Precision
from gristmill.training.parallel.tensor import TensorAxis

# B samples, T tokens, V vocabulary; Vt = this tensor rank's share


@dataclass(frozen=True)
class WholeModel:
    """What the engine asks of a stage: that this one computes the loss, and that it has no experts of ours."""

    scores: bool = True
    embeds: bool = True
    has_experts: bool = False


class TransformersModel(nn.Module):
    """x, tokens int64[B, T] -> logits [B, T, Vt], or `output` of them during training and evaluation passes."""

    stage = WholeModel()
    config = WholeModel()

    def __init__(self, model: nn.Module, mesh: Mesh, precision: Precision, z_loss: float = 0.0):
        super().__init__()
        self.model, self.mesh, self.compute, self.z_loss = model, mesh, precision.compute, z_loss
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.head = model.get_output_embeddings()
        self.output: Any = None
        self.side_loss_factor: float | None = None

    def forward(self, x: Tensor, **batch: Tensor) -> Any:
        logits_BTVt = self._logits(x)
        return logits_BTVt if self.output is None else self.output(LogitsOutput(self, logits_BTVt), batch)

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        region = ShardedRegion(self.mesh.tensor_grid) if self.mesh.tensor.size > 1 else nullcontext()
        with region:
            if self.mesh.distributed:
                return self.model(input_ids=tokens_BT).logits
            parameters = {name: each.to(self.compute) for name, each in self.model.named_parameters()}
            return functional_call(self.model, parameters, (), {"input_ids": tokens_BT}).logits

    def scoring(self, logits: Tensor) -> Scoring:
        """Over this rank's part of the vocabulary, or over all of it where the output layer is replicated."""
        mesh = self.mesh if isinstance(logits, DTensor) else single_process(self.mesh.device)
        return Scoring(TensorAxis(mesh, False), self.vocab_size, z_loss=self.z_loss)


class LogitsOutput:
    """The functions of `ModelOutput` that the objective `causal` uses. Holds the logits of all tokens."""

    def __init__(self, model: TransformersModel, logits: Tensor):
        self._scoring = model.scoring(logits)
        self._logits_BTVt = upcast(logits.to_local() if isinstance(logits, DTensor) else logits)

    def token_losses(self, targets_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(negative log-likelihood of the targets, zeros): float[B] each, summed over the tokens by weight."""
        nll_B = -(self.log_probs(targets_BT) * weights_BT).sum(dim=1)
        return nll_B, torch.zeros_like(nll_B)

    def log_probs(self, targets_BT: Tensor) -> Tensor:
        """log p(target), [B, T]."""
        return token_log_probs(self._scoring, self._logits_BTVt, targets_BT)

    def best_tokens(self) -> Tensor:
        """The most probable token of each place, int64[B, T]."""
        return self._scoring.best(self._logits_BTVt)

    @property
    def loss_dtype(self) -> torch.dtype:
        return upcast_dtype(self._logits_BTVt)

    @property
    def has_z_loss(self) -> bool:
        return False


def parallelize(
    model: nn.Module, plan: TensorPlan, mesh: Mesh, precision: Precision, reshard_after_forward: bool = True
) -> TransformersModel:
    """The model on this process's device, under the plan and FSDP where there are several processes."""
    apply_plan(model, plan, mesh.tensor_grid if plan.degree > 1 else None)
    model.to(mesh.device)
    wrapped = TransformersModel(model, mesh, precision)
    if mesh.distributed:
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
        )
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(wrapped, mesh=mesh.data_grid, mp_policy=policy, reshard_after_forward=False)
        sum_gradients(wrapped)
    return wrapped


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP gathers one at a time: those that transformers does not split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():  # the outer one of two, as of Mamba's block and mixer
        if type(module).__name__ in names and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return list(found.values())


def whole_on_each_rank(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> frozenset[str]:
    """Names of the parameters that the tensor ranks do not share: each of them holds the whole of it."""
    if mesh.tensor.size == 1:
        return frozenset()
    dims = mesh.data_grid.ndim
    return frozenset(
        name
        for name, parameter in parameters.items()
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == dims
    )
