"""Loads a model for evaluation or generation, sharded over the processes that torchrun started."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm

from gristmill.evaluation.config import EvaluateConfig, OffloadParameters
from gristmill.evaluation.models.load import (
    LoadedModel,
    load_for_evaluation,
    load_for_evaluation_sharded,
    own_config,
)
from gristmill.evaluation.workdir import CheckpointPaths, find_checkpoint
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.errors import RecipeError
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.processes import RankInfo, init_distributed

TIMEOUT_SECONDS = 1800.0  # as the recipe's default for training


@dataclass(frozen=True)
class ModelParallel:
    """How many tensor-parallel ranks and pipeline stages one replica of the model is sharded over; expert: ranks of a
    stage that its experts are divided over, the tensor ranks first."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        return lcm(self.tensor, self.expert) * self.pipeline

    def __str__(self) -> str:
        expert = f", expert={self.expert}" if self.expert > 1 else ""
        return f"tensor={self.tensor} x pipeline={self.pipeline}{expert}"

    def require_processes(self, number: int) -> None:
        """Raises RecipeError unless so many processes hold whole replicas."""
        if number == 1 and self.size > 1:
            raise RecipeError(f"one process cannot hold {self} of a model; start more with torchrun")
        if number % self.size:
            raise RecipeError(f"{number} processes are not a multiple of {self}; start a multiple of the product")


NO_MODEL_PARALLEL = ModelParallel()
ONLY_PROCESS = RankInfo()
NO_HEADS = ModelConfig(layers=1, width=64, heads=1)  # the mesh of replicas needs none, nor that of transformers' models


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started, how the model is sharded over them, and where the weights of its
    layers lie for `gristmill generate`."""

    rank: RankInfo = ONLY_PROCESS
    parallel: ModelParallel = NO_MODEL_PARALLEL
    offload_parameters: OffloadParameters = "none"


NO_OTHER_RANKS = Ranks()


@contextmanager
def one_model_on_ranks(
    source: CheckpointPaths, config: EvaluateConfig, ranks: Ranks
) -> Iterator[tuple[LoadedModel, Mesh]]:
    """The model that all processes hold together, for generation. source: of a run, or of one checkpoint."""
    ranks.parallel.require_processes(ranks.rank.world_size)
    if ranks.rank.world_size > ranks.parallel.size:
        raise RecipeError(
            f"{ranks.rank.world_size} processes for {ranks.parallel}: generation runs one model; start "
            f"{ranks.parallel.size}, or set --tensor"
        )
    source = CheckpointPaths(find_checkpoint(source.checkpoint), source.tokenizer)
    with loaded_on_ranks(source, config, ranks.rank, ranks.parallel) as found:
        yield found


@contextmanager
def loaded_on_ranks(
    source: CheckpointPaths, config: EvaluateConfig, rank: RankInfo, parallel: ModelParallel
) -> Iterator[tuple[LoadedModel, Mesh]]:
    """Yields this rank's shard of the model, or a replica, and the mesh of all processes. source: of one checkpoint."""
    checkpoint, sharded = source.checkpoint, parallel.size > 1
    if sharded and config.weights != "as_trained":
        raise RecipeError(f"weights={config.weights} cannot be sharded; set tensor and pipeline to 1")
    layout = LayoutConfig(
        data=rank.world_size // (parallel.tensor * parallel.pipeline),
        expert=parallel.expert,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        sequence_parallel=False,
    )
    own = own_config(checkpoint) if sharded else None
    if sharded and own is None and parallel.size > parallel.tensor:
        raise RecipeError(f"{checkpoint}: transformers' code runs on tensor ranks only; set pipeline and expert to 1")
    if own is not None and parallel.expert > 1:
        _check_experts(own, parallel.expert)
    digest = fingerprint([config.model_dump(mode="json"), checkpoint.name])
    with init_distributed(rank, layout, own or NO_HEADS, digest, TIMEOUT_SECONDS) as mesh:
        yield (
            load_for_evaluation_sharded(source, config, layout, mesh)
            if sharded
            else load_for_evaluation(source, config, mesh.device),
            mesh,
        )


def _check_experts(model: ModelConfig, expert: int) -> None:
    """Raises RecipeError unless the experts of every layer divide over so many ranks."""
    counts = sorted({layer.experts for layer in model.layer_list if layer.experts})
    if not counts or any(count % expert for count in counts):
        raise RecipeError(f"expert={expert}: the model's layers have {counts or 'no'} experts; set a divisor, or 1")
