"""A causal language model of transformers in the place of our own: forward, loss, tensor parallelism and FSDP."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from gristmill.training.auto_tp.apply_plan import ShardedRegion, apply_plan, whole_parameters
from gristmill.training.auto_tp.plan import TensorPlan, described
from gristmill.training.auto_tp.transformers_folder import TransformersFolder, plan_for
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.fsdp import sum_gradients
from gristmill.training.engine.local_model import PRECISIONS, LocalModel, Precision
from gristmill.training.model.loss import Scoring, token_log_probs, upcast, upcast_dtype
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.parallel.tensor import TensorAxis

# B samples, T tokens, V vocabulary; Vt = this tensor rank's share


@dataclass(frozen=True)
class WholeModel:
    """The stage as the engine sees it: it computes the loss and has no experts of ours."""

    has_head: bool = True
    has_embedding: bool = True
    has_experts: bool = False


class TransformersModel(nn.Module):
    """x, tokens int64[B, T] -> logits [B, T, Vt], or `output` of them during training and evaluation passes."""

    stage = WholeModel()
    config = WholeModel()

    model: Any  # of transformers

    def __init__(self, model: Any, mesh: Mesh, precision: Precision, z_loss: float = 0.0):
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
        grid = self.mesh.tensor_grid
        with ShardedRegion(grid) if grid is not None and self.mesh.tensor.size > 1 else nullcontext():
            if self.mesh.distributed:
                return self.model(input_ids=tokens_BT).logits
            parameters = {name: parameter.to(self.compute) for name, parameter in self.model.named_parameters()}
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
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():  # the outer one of two, as of Mamba's block and mixer
        if type(module).__name__ in names and not any(path.startswith(f"{outer}.") for outer in blocks):
            blocks[path] = module
    return list(blocks.values())


def whole_on_each_rank(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> frozenset[str]:
    """Names of the parameters that the tensor ranks do not share: each of them holds the whole of it."""
    if mesh.tensor.size == 1 or mesh.data_grid is None:
        return frozenset()
    dims = mesh.data_grid.ndim
    return frozenset(
        name
        for name, parameter in parameters.items()
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == dims
    )


# A model of transformers as the part of a run that the trainer updates and a checkpoint saves.


@dataclass
class TransformersLocalModel(LocalModel):
    """stages holds the one model under 0. tokens: of a sample."""

    tokens: int = 0

    @property
    def sequence_length(self) -> int:
        return self.tokens

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {}


def local_model(model: TransformersModel, mesh: Mesh, sequence_length: int) -> TransformersLocalModel:
    """Parameters have the names of transformers, with those of the pieces of fused layers. The global norm counts a
    parameter that tensor ranks do not share on the first of them only."""
    parameters = dict(model.model.named_parameters())
    whole = whole_on_each_rank(parameters, mesh) if mesh.tensor.rank else frozenset()
    stages: dict[int, Any] = {0: model}
    return TransformersLocalModel(stages, parameters, excluded_from_norm=whole, tokens=sequence_length)


def build_transformers_model(
    folder: TransformersFolder, train: TrainConfig, mesh: Mesh, sequence_length: int, info: Callable[[str], None]
) -> TransformersLocalModel:
    """The folder's model on this process, under a plan by rules that is printed, and FSDP. Collective."""
    precision = PRECISIONS[train.precision]
    plan, traced = plan_for(folder.skeleton(), mesh.tensor.size)
    if mesh.tensor.size > 1 and mesh.is_first:
        for line in described(plan, traced, precision.compute.itemsize):
            info(f"train: {line}")
    model = parallelize(folder.load(precision.store), plan, mesh, precision, train.layout.reshards)
    model.train()
    return local_model(model, mesh, sequence_length)


def save_transformers_folder(local: LocalModel, folder: TransformersFolder, target: Path, mesh: Mesh) -> None:
    """Writes the weights as a folder that transformers opens; complete or absent. Collective."""
    model: Any = local.stages[0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters = whole_parameters(model.model, lambda parameter: parameter.detach())
    tensors = {name: whole.cpu() for name, whole in parameters if whole is not None}
    if mesh.is_first:
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        folder.save(temporary, tensors)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
