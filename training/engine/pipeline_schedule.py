"""Pipeline parallelism: runs the micro-batches of a step through the stages with one of torch's schedules."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
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

from gristmill.training.costs.stage_splitting import stages_of_rank
from gristmill.training.engine.forward_backward import (
    Batch,
    Factors,
    Loss,
    joined,
    no_callback,
    output_of,
    scaled_sum,
    side_losses_scaled_by,
    split,
)
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.loss import upcast_dtype
from gristmill.training.model.transformer import OutputFunction, Transformer
from gristmill.training.parallel.mesh import Mesh

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}


class _PhaseCallback:
    """Phase callback of the current step."""

    begin: Callable[[str], None] = staticmethod(no_callback)


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
            found = stage_backward_weight(model.parameters(), bwd_kwargs["param_groups"])
            for state in fully_shard.state(model)._state_ctx.all_states:
                for group in state._fsdp_param_groups:
                    group.post_backward()
            return found, None
        found = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return found, None

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        return self._within("forward", super().forward_one_chunk, arguments, named)

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
    """What crosses a stage boundary is this context rank's tokens, and of them this tensor rank's share under sequence
    parallelism (the saving of arXiv 2104.04473, section 4.1, without its gather).

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
            losses = schedule.step(*first, target=target, loss_kwargs={"factors": factors}, **batch)
        return None if losses is None else losses.detach()

    @torch.no_grad()
    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any:
        with output_of(self.stages.values(), output or self.loss):
            results = [self._evaluate_micro(micro) for micro in split(batch, self.micro_batch)]
        return joined(results) if self._last in self.stages else None

    def _evaluate_micro(self, micro: Batch) -> Any:
        tokens = x = micro["tokens"]
        for stage in sorted(self.stages):
            if stage > 0 and stage - 1 not in self.stages:
                x = self._boundary(tokens.shape)
                dist.recv(x, group=self.mesh.pipeline.group, group_src=self._rank_of[stage - 1])
            x = self.stages[stage](x, **micro)
            if stage < self._last and stage + 1 not in self.stages:
                dist.send(x, group=self.mesh.pipeline.group, group_dst=self._rank_of[stage + 1])
        return x if self._last in self.stages else None

    def _schedule(self, shape: torch.Size) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """shape: of the tokens, [samples, T] or [samples, rows, T]."""
        stages = [self._stage(number, shape[1:]) for number in sorted(self.stages)]
        micro_batches = shape[0] // self.micro_batch
        if self.layout.schedule in SINGLE:
            single = SINGLE[self.layout.schedule]
            return single(stages[0], micro_batches, loss_fn=_loss, scale_grads=False)
        multiple = MULTIPLE[self.layout.schedule]
        return multiple(stages, micro_batches, loss_fn=_loss, scale_grads=False)

    def _stage(self, number: int, sample: torch.Size) -> PipelineStage:
        """A stage with given input and output shapes; torch would otherwise infer them with an extra forward pass on
        uninitialised memory."""
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
        """What crosses for tokens of this shape."""
        part = next(iter(self.stages.values()))
        share = shape[-1] // self.layout.context
        share = share // part.tensor.size if part.tensor.shards_tokens else share
        return torch.empty(shape[:-1].numel(), share, part.config.width, dtype=part.dtype, device=self.mesh.device)


def _loss(losses_bn: Tensor, _: Tensor, factors: Factors) -> Tensor:
    return scaled_sum(losses_bn, factors)
