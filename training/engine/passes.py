"""Forward and backward passes over the micro-batches of one step; gradient accumulation without a pipeline;
and the same passes recorded as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.engine.fsdp import parameter_groups
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.model.heads import ModelOutput
from gristmill.training.model.loss import upcast_dtype
from gristmill.training.model.transformer import OutputFunction, Transformer
from gristmill.training.parallel.context import HOST_DOCUMENTS
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.planner.costs.stage_splitting import stages_of_rank

Batch = Mapping[str, Tensor]  # fields by name, each [samples of this data rank, ...]
Factors = Sequence[float] | Tensor  # of the terms of the loss

# b samples of this data rank


def no_callback(phase: str) -> None:
    """Ignores phases."""


class Loss(Protocol):
    """The loss at the end of the model: float[b, terms]; the engine adds the terms, each with its factor."""

    @property
    def terms(self) -> Sequence[Any]: ...

    def __call__(self, model: ModelOutput, batch: Batch) -> Tensor: ...


class ForwardBackward(Protocol):
    """Results are those of the last stage, where it is on this process, and None elsewhere.

    train: leaves the gradients of the sum of factor x loss over terms and samples, summed over the data ranks; returns
    the losses float[b, terms]. begin is called with "forward" and "backward" as they begin (with a pipeline also
    "pipeline": messages and waiting for other stages). evaluate: what `output` makes of the model's output, a tensor
    or tensors by name, each [b, ...]; by default the losses. loss: None for a model that is not trained, which gives
    its hidden states."""

    loss: "Loss | None"

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor | None: ...

    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any: ...


class GradientAccumulation:
    """Runs micro-batches one after another; gradients are reduced over the data ranks once, with the last one, or with
    each where no rank has memory for those of the whole model (`reduces_each`)."""

    def __init__(self, model: Transformer, micro_batch: int, loss: Loss | None, reduces_each: bool = False):
        self.model, self.micro_batch, self.loss, self.reduces_each = model, micro_batch, loss, reduces_each
        self.before_backward: Callable[[bool], None] = lambda last: None  # told whether the pass completes gradients

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor:
        micro_batches = list(split(batch, self.micro_batch))
        losses = []
        with side_losses_scaled_by(factors[0], [self.model]), output_of([self.model], self.loss):
            for index, micro in enumerate(micro_batches):
                self._sum_over_ranks(index == len(micro_batches) - 1)
                begin("forward")
                self.model.host_documents = micro.pop(HOST_DOCUMENTS, None)
                losses_bn = self.model(micro["tokens"], **micro)
                begin("backward")
                self.before_backward(index == len(micro_batches) - 1)
                scaled_sum(losses_bn, factors).backward()
                losses.append(losses_bn.detach())
        return torch.cat(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any:
        with output_of([self.model], output or self.loss):
            return joined([self._evaluate_micro(micro) for micro in split(batch, self.micro_batch)])

    def _evaluate_micro(self, micro: dict[str, Tensor]) -> Any:
        self.model.host_documents = micro.pop(HOST_DOCUMENTS, None)
        return self.model(micro["tokens"], **micro)

    def _sum_over_ranks(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or self.reduces_each)
            self.model.set_is_last_backward(last)


@contextmanager
def side_losses_scaled_by(factor: float | Tensor, stages: Iterable[Transformer]) -> Iterator[None]:
    """While this runs, passes are training passes: experts add their own losses, times factor, to the gradients."""
    stages = list(stages)
    for stage in stages:
        stage.side_loss_factor = factor
    try:
        yield
    finally:
        for stage in stages:
            stage.side_loss_factor = None


@contextmanager
def output_of(stages: Iterable[Transformer], output: OutputFunction | None) -> Iterator[None]:
    """While this runs, the last stage returns `output` of the model's output."""
    stages = list(stages)
    for stage in stages:
        stage.output = output if stage.stage.has_head and stage.head is not None else None
    try:
        yield
    finally:
        for stage in stages:
            stage.output = None


def scaled_sum(losses_bn: Tensor, factors: Factors) -> Tensor:
    """The sum of factor x loss over terms and samples."""
    factors_n = torch.as_tensor(factors, dtype=losses_bn.dtype, device=losses_bn.device)
    return (losses_bn.sum(dim=0) * factors_n).sum()


def joined(results: Sequence[Any]) -> Any:
    """The results of micro-batches, tensors or tensors by name, as that of the batch."""
    if isinstance(results[0], Mapping):
        return {name: torch.cat([result[name] for result in results]) for name in results[0]}
    return torch.cat(list(results))


def split(batch: Batch, micro_batch: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches in order; the last holds what is left."""
    for start in range(0, len(batch["tokens"]), micro_batch):
        yield {name: values[start : start + micro_batch] for name, values in batch.items()}


# Pipeline parallelism: runs the micro-batches of a step through the stages with one of torch's schedules.

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}


class _PhaseCallback:
    """Phase callback of the current step, and its documents on the host by micro-batch."""

    begin: Callable[[str], None] = staticmethod(no_callback)
    host_documents: Sequence[Tensor] = ()


class _Stage(PipelineStage):
    """A pipeline stage that reports the begin and end of its forward and backward passes, and keeps FSDP's weights and
    gradients as the layout says: torch's own keeps both to the end of the step."""

    def __init__(self, phase_callback: _PhaseCallback, layout: LayoutConfig, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._phase, self._layout = phase_callback, layout

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        model, layout = self.submod, self._layout
        if not isinstance(model, FSDPModule) or not (layout.reshards or layout.reduce_each_micro_batch):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # The first half of a split pass has no gradients of weights; the second runs no hooks of FSDP.
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(layout.reshards)
        model.set_requires_gradient_sync(layout.reduce_each_micro_batch and backward_type != "input")
        if backward_type == "input":
            return stage_backward_input(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"], model.parameters()
            )
        if backward_type == "weight":
            gradients = stage_backward_weight(model.parameters(), bwd_kwargs["param_groups"])
            for state in model._get_fsdp_state()._state_ctx.all_states:
                for group in parameter_groups(state):
                    group.post_backward()
            return gradients, None
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        if self._phase.host_documents:
            self.submod.host_documents = self._phase.host_documents[fwd_chunk_id]
        return self._within("forward", super().forward_one_chunk, (fwd_chunk_id, *arguments), named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        return self._within("backward", super().backward_one_chunk, arguments, named)

    def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        return self._within("backward", super().backward_weight_one_chunk, arguments, named)

    def _within(self, phase: str, work: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._phase.begin(phase)
        result = work(*arguments, **named)
        self._phase.begin("pipeline")
        return result


class PipelineSchedule:
    """A pipeline schedule. This context rank's tokens cross a stage boundary, and of them this tensor rank's share
    under sequence parallelism (the saving of arXiv 2104.04473, section 4.1, without its gather).

    torch fixes the shapes of a schedule when it is built, so each batch shape has its own schedule. Evaluation runs the
    stages in order without a schedule, for any number of samples."""

    def __init__(
        self,
        stages: Mapping[int, Transformer],
        layout: LayoutConfig,
        mesh: Mesh,
        micro_batch: int,
        loss: Loss | None,
    ):
        self.stages, self.layout, self.mesh, self.micro_batch, self.loss = stages, layout, mesh, micro_batch, loss
        self._last = layout.num_stages - 1
        self._rank_of = {stage: rank for rank in range(layout.pipeline) for stage in stages_of_rank(layout, rank)}
        self._phase = _PhaseCallback()
        self._schedules: dict[torch.Size, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._factors: Factors = ()  # of the current step

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor | None:
        self._phase.begin = begin
        begin("pipeline")
        tokens = batch["tokens"]
        if tokens.shape not in self._schedules:
            self._schedules[tokens.shape] = self._schedule(tokens.shape)
        schedule = self._schedules[tokens.shape]
        first = (tokens,) if 0 in self.stages else ()
        target = tokens if self._last in self.stages else None  # torch wants one; the loss has its own
        stages = self.stages.values()
        with side_losses_scaled_by(factors[0], stages), output_of(stages, self.loss):
            self._factors = factors
            fields: dict[str, Any] = dict(batch)
            documents = fields.pop(HOST_DOCUMENTS, None)
            self._phase.host_documents = () if documents is None else documents.split(self.micro_batch)
            losses = schedule.step(*first, target=target, **fields)
        return None if losses is None else losses.detach()

    @torch.no_grad()
    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any:
        with output_of(self.stages.values(), output or self.loss):
            results = [self._evaluate_micro(micro) for micro in split(batch, self.micro_batch)]
        return joined(results) if self._last in self.stages else None

    def _evaluate_micro(self, micro: dict[str, Tensor]) -> Any:
        tokens = x = micro["tokens"]
        documents = micro.pop(HOST_DOCUMENTS, None)
        for stage in sorted(self.stages):
            if stage > 0 and stage - 1 not in self.stages:
                x = self._boundary(tokens.shape)
                dist.recv(x, group=self.mesh.pipeline.group, group_src=self._rank_of[stage - 1])
            self.stages[stage].host_documents = documents
            x = self.stages[stage](x, **micro)
            if stage < self._last and stage + 1 not in self.stages:
                dist.send(x, group=self.mesh.pipeline.group, group_dst=self._rank_of[stage + 1])
        return x if self._last in self.stages else None

    def _scaled_loss(self, losses_bn: Tensor, _: Tensor) -> Tensor:
        return scaled_sum(losses_bn, self._factors)

    def _schedule(self, shape: torch.Size) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """shape: of the tokens, [samples, T] or [samples, rows, T]."""
        stages: list[Any] = [self._stage(number, shape[1:]) for number in sorted(self.stages)]
        micro_batches = shape[0] // self.micro_batch
        if self.layout.pipeline_schedule in SINGLE:
            single = SINGLE[self.layout.pipeline_schedule]
            return single(stages[0], micro_batches, loss_fn=self._scaled_loss, scale_grads=False)
        multiple = MULTIPLE[self.layout.pipeline_schedule]
        return multiple(stages, micro_batches, loss_fn=self._scaled_loss, scale_grads=False)

    def _stage(self, number: int, sample: torch.Size) -> PipelineStage:
        """A stage with given input and output shapes; torch would otherwise infer them with an extra forward pass on
        uninitialized memory."""
        part = self.stages[number]
        shape = torch.Size([self.micro_batch, *sample])
        hidden = self._boundary(shape).requires_grad_()
        first = torch.empty(shape, dtype=torch.int64, device=self.mesh.device)
        terms = 1 if self.loss is None else len(self.loss.terms)
        losses = torch.empty(
            self.micro_batch, terms, dtype=upcast_dtype(hidden), device=self.mesh.device, requires_grad=True
        )
        return _Stage(
            self._phase,
            self.layout,
            part,
            number,
            self.layout.num_stages,
            self.mesh.device,
            input_args=first if number == 0 else hidden,
            output_args=losses if number == self._last else hidden,
            group=self.mesh.pipeline.group,
        )

    def _boundary(self, shape: torch.Size) -> Tensor:
        """Meta tensor of what crosses the boundary for tokens of this shape."""
        part = next(iter(self.stages.values()))
        share = shape[-1] // self.layout.context
        share = share // part.tensor.size if part.tensor.shards_tokens else share
        return torch.empty(shape[:-1].numel(), share, part.config.width, dtype=part.dtype, device=self.mesh.device)


# The passes of a micro-batch as one CUDA graph: the host starts one graph instead of a kernel for each operation.


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
