"""The passes of a micro-batch as one CUDA graph: the host starts one graph instead of a kernel for each operation."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.engine.passes import (
    Batch,
    Factors,
    GradientAccumulation,
    Loss,
    no_callback,
    output_of,
    scaled_sum,
    side_losses_scaled_by,
    split,
)

WARM_UPS = 3  # passes before the capture, in which libraries take their workspaces and masks are made (torch's advice)
MAX_SHAPES = 4  # of micro-batches: each has a graph, whose memory is kept

Shape = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Recording(Protocol):
    """Runs a function that reads and writes the same memory each time; the result is in the same memory too."""

    def run(self, function: Callable[[], Tensor]) -> Tensor: ...


class CudaGraph:
    """Runs the function as it is WARM_UPS times, then captures it and replays the graph."""

    def __init__(self, device: torch.device):
        self.device = device
        self._warm_ups = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        if self._warm_ups < WARM_UPS:
            self._warm_ups += 1
            current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                result = function()
            current.wait_stream(side)
            return result
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads go on: the next batch is copied to pinned memory in one.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = function()
        self._graph.replay()
        assert self._result is not None
        return self._result


class GraphedAccumulation(GradientAccumulation):
    """Gradient accumulation whose passes run in the same memory each time: the fields of the micro-batch and the
    factors are copied to where the recorded passes read them, and gradients are added to where they were. Nothing in
    the passes waits for the device; the norm, the guard and the update come after them, as without graphs."""

    def __init__(self, local: LocalModel, micro_batch: int, loss: Loss | None, record: Callable[[], Recording]):
        super().__init__(local.stages[0], micro_batch, loss)
        self.local, self._record = local, record
        self._recordings: dict[Shape, tuple[Recording, dict[str, Tensor]]] = {}
        self._factors: Tensor | None = None
        local.keeps_gradients = True

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor:
        begin("forward")  # both passes
        self._prepare(torch.as_tensor(factors, dtype=torch.float64, device=batch["tokens"].device))
        assert self._factors is not None
        with side_losses_scaled_by(self._factors[0], [self.model]), output_of([self.model], self.loss):
            return torch.cat([self._both_passes(micro) for micro in split(batch, self.micro_batch)])

    def _prepare(self, factors: Tensor) -> None:
        """Fills the memory that the recorded passes read: this step's factors, gradients and weights in 8 bits."""
        if self._factors is None:
            self._factors = factors.clone()
        self._factors.copy_(factors)
        for parameter in self.local.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for weights in self.local.float8:
            weights.cast(self.model)

    def _both_passes(self, micro: Batch) -> Tensor:
        recording, fields = self._recording_of(micro)
        for name, values in micro.items():
            fields[name].copy_(values)

        def passes() -> Tensor:
            losses_bn = self.model(fields["tokens"], **fields)
            assert self._factors is not None
            scaled_sum(losses_bn, self._factors).backward()
            return losses_bn.detach()

        return recording.run(passes).clone()

    def _recording_of(self, micro: Batch) -> tuple[Recording, dict[str, Tensor]]:
        shape = tuple((name, values.shape, values.dtype) for name, values in sorted(micro.items()))
        if shape not in self._recordings:
            if len(self._recordings) == MAX_SHAPES:
                raise InputError(
                    f"train.cuda_graphs: the micro-batches have more than {MAX_SHAPES} shapes, and each has a graph "
                    "whose memory is kept; make samples of one shape, or set cuda_graphs: false"
                )
            self._recordings[shape] = self._record(), {name: values.clone() for name, values in micro.items()}
        return self._recordings[shape]


def check_cuda_graphs(device: torch.device) -> None:
    """Raises RecipeError where the device has no CUDA graphs."""
    if device.type != "cuda":
        raise RecipeError(f"train.cuda_graphs needs a CUDA device, not {device}; set it false")
