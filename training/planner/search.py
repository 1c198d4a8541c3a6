"""Search the legal layouts of a model on a machine: memory and time of each, ranked; rejected ones with the reason."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layout import ON_DEVICE, SWAPS, OffloadConfig, Recompute
from gristmill.training.planner.activations import ElementSizes, SwapPlan, solve_share
from gristmill.training.planner.costs.model_shape import ModelShape, step_flops
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.costs.stage_splitting import balance_by_speed, rank_of_stage
from gristmill.training.planner.hardware import GIB, Rates, routed_on
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.layout_candidates import Placement, naive_links, open_layouts, place
from gristmill.training.planner.memory import Memory, MemoryModel
from gristmill.training.planner.plan_request import PlanRequest, check
from gristmill.training.planner.step_time import StepModel, StepTime

# A layout that needs so many times the usable memory under the strongest recomputation is not tried under others.
MAX_OVERSUBSCRIPTION = 1.5
# Of |forecast / published - 1| over the published runs of other programs and machines that nothing was fitted to: four
# of five are below (benchmarks/planner.py prints all; tests/benchmarks/test_published.py checks it).
THROUGHPUT_ERROR = 0.12
# The largest error of any published run: for what no run is like, and for mixtures of experts, of which there are few.
LARGEST_ERROR = 0.22
PUBLISHED_DEVICES = ("a100", "h100", "h200")  # h200: the H100's processor with more and faster memory
# Devices with a table or two: the error that all but one run keep, and what is to be known of it.
FEW_RUNS = {
    "b200": (0.29, "Ten published runs on B200 were compared, blind: nine are within 29 %, GPT-OSS 120B is 71 % off.")
}
# What tests allow between the forecast of activations and what autograd keeps (tests/training/planner).
MOVING_MEMORY_ERROR = 0.05


@dataclass(frozen=True)
class Forecast:
    """Forecast of one layout. Throughput is of all GPUs; memory is of the rank that needs the most."""

    layout: Layout
    time: StepTime
    memory: Memory
    tokens_per_second: float
    mfu: float
    placement: Placement
    split_points: tuple[int, ...] | None = None
    error: float = THROUGHPUT_ERROR

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """By the errors of published runs that nothing was fitted to: `support`."""
        return self.tokens_per_second / (1 + self.error), self.tokens_per_second / (1 - self.error)

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes of the rank that needs the most: parameters and optimizer state are exact, activations are not."""
        moving = MOVING_MEMORY_ERROR * self.memory.moving
        return self.memory.total - moving, self.memory.total + moving

    def tflops_per_gpu(self, shape: ModelShape) -> float:
        """Model FLOPs (attention in full, nothing recomputed) a second on each GPU, in TFLOP/s."""
        return step_flops(shape, 1) * self.tokens_per_second / shape.sequence_length / self.layout.gpus / 1e12


@dataclass(frozen=True)
class Failure:
    """A reason for rejection, the number of layouts it applies to, and one of them."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class SearchResult:
    """ranked: the fastest first. num_candidates: layouts that were evaluated, rejected ones included."""

    request: PlanRequest
    ranked: tuple[Forecast, ...]
    failures: tuple[Failure, ...]
    num_candidates: int

    @property
    def best(self) -> Forecast:
        """Raises RecipeError where nothing fits, with what to change."""
        if not self.ranked:
            raise RecipeError(nothing_fits(self))
        return self.ranked[0]


class Planner:
    """Memory and time models of one request."""

    def __init__(self, request: PlanRequest) -> None:
        check(request)
        self.request = request
        routed = routed_on(request.hardware.device, request.imbalance)
        self.rates = Rates(request.hardware, request.sustained, request.float8, routed)
        self.steps = StepModel(request.shape, self.rates, request.framework, request.offload)
        self.memories = MemoryModel(
            request.shape, request.framework, self._sizes(), request.offload, self.steps.device_share
        )
        self.capacity = request.usable_bytes
        self.flops = step_flops(request.shape, request.samples)
        self._placements: dict[Layout, Placement] = {}

    def _sizes(self) -> ElementSizes:
        """Our engine gathers weights in 8 bits, those of experts excepted, which are most of a mixture's."""
        experts = any(block.experts for block in self.request.shape.distinct)
        return ElementSizes(float8=self.request.float8 and self.request.framework.gathers_float8 and not experts)

    def memory(self, layout: Layout, split_points: tuple[int, ...] | None = None) -> Memory:
        """Memory of the rank that needs the most."""
        return self.memories.fullest(
            layout, self.steps.rank_layers(layout, split_points), layout.microbatches(self.request.samples)
        )

    def memory_by_rank(self, layout: Layout, split_points: tuple[int, ...] | None = None) -> list[Memory]:
        """Memory of every pipeline rank."""
        return self.memories.ranks(
            layout, self.steps.rank_layers(layout, split_points), layout.microbatches(self.request.samples)
        )

    def placement(self, layout: Layout) -> Placement:
        key = replace(
            layout,
            micro_batch=1,
            recompute="none",
            offloaded_token_fraction=None,
            virtual=1,
            pipeline_schedule="1f1b",
            sequence_parallel=False,
        )
        if key not in self._placements:
            self._placements[key] = place(layout, self.rates)
        return self._placements[key]

    def split_points(self, layout: Layout, placement: Placement) -> tuple[int, ...] | None:
        """Split points for stages on machines of different speed; None: the engine splits by cost."""
        if len(set(placement.speeds)) < 2:
            return None
        passes, _, last = self.steps.block_times(layout, placement.links)
        costs = [block.forward.seconds + block.backward.seconds for block in passes]
        ends = last.forward.seconds + last.backward.seconds
        ranks = [rank_of_stage(stage, layout.pipeline, layout.pipeline_schedule) for stage in range(layout.stages)]
        speeds = [placement.speeds[rank] for rank in ranks]
        return balance_by_speed([costs[kind] for kind in self.request.shape.kinds], ends, speeds)

    def swap_plan(self, layout: Layout) -> SwapPlan:
        """The share of the tokens that recompute: tokens swaps, of the pipeline rank whose host memory is tightest. The
        kind of layer that keeps the most counts."""
        placement = self.placement(layout)
        times, _, _ = self.steps.block_times(layout, placement.links)
        ranks = self.steps.rank_layers(layout, self.split_points(layout, placement))
        microbatches = layout.microbatches(self.request.samples)
        swapped = max(
            self.memories.swapped_layers(layout, stage_layers, place, microbatches)
            for place, stage_layers in enumerate(ranks)
        )
        kinds = range(len(self.request.shape.distinct))
        sizes = [self.memories.swap_bytes(layout, kind) for kind in kinds]
        kind = max(kinds, key=lambda index: sizes[index].of_share(1.0))
        state = self.memory(replace(layout, recompute="none")).host
        link = self.request.hardware.host_link.bytes_per_second
        seconds = times[kind].forward.seconds
        return solve_share(sizes[kind], swapped, seconds, link, self.request.host_bytes - state)

    def with_share(self, layout: Layout) -> Layout:
        """With the planned share, where recompute: tokens leaves it open."""
        if layout.recompute != "tokens" or layout.offloaded_token_fraction is not None:
            return layout
        return replace(layout, offloaded_token_fraction=self.swap_plan(layout).share)

    def forecast(self, layout: Layout, memory: Memory | None = None, naive: bool = False) -> Forecast:
        """Forecast one layout, whether it fits or not. naive: with a rank order that ignores clusters."""
        placement = self.placement(layout)
        if naive:
            placement = replace(placement, links=naive_links(layout, self.rates), rank_order=None)
        split_points = self.split_points(layout, placement)
        time = self.steps.step(layout, self.request.samples, split_points, placement.links, placement.speeds)
        tokens = self.request.samples * self.request.shape.sequence_length / time.total
        mfu = self.flops / time.total / layout.gpus / self.rates.peak
        memory = memory or self.memory(layout, split_points)
        error, _ = support(self.request, layout)
        return Forecast(layout, time, memory, tokens, mfu, placement, split_points, error)


def support(request: PlanRequest, layout: Layout) -> tuple[float, str]:
    """(relative error to expect of a forecast, a sentence where no published run supports it).

    Of forecasts that published runs resemble, the error that four of five of them keep; of mixtures, that all keep."""
    unlike = []
    few = FEW_RUNS.get(request.hardware.name)
    if few is None and not request.hardware.name.startswith(PUBLISHED_DEVICES):
        unlike.append(f"the hardware {request.hardware.name}")
    if layout.context > 1:
        unlike.append("a context axis")
    unlike += [f"the mixer {name}" for name in request.shape.model.stateful_mixers]
    if not unlike and few is not None:
        return few
    if not unlike:
        return LARGEST_ERROR if request.shape.has_experts else THROUGHPUT_ERROR, ""
    return LARGEST_ERROR, (
        f"No published run that was compared has {' or '.join(unlike)}: the range is the largest error of any, "
        f"{LARGEST_ERROR:.0%}, and no bound."
    )


def search(request: PlanRequest) -> SearchResult:
    """Rank every legal layout that fits."""
    planner = Planner(request)
    ranked: list[Forecast] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    num_candidates = 0

    def fail(reason: str, example: str) -> None:
        reasons[reason] += 1
        examples.setdefault(reason, example)

    for layout in open_layouts(request, fail):
        num_candidates += 1
        reason = _illegal_whatever_is_recomputed(request, layout)
        if reason is not None:
            fail(reason, layout.name())
            continue
        fitting, need = choose_recompute(planner, layout)
        for lean in _with_less_state(request, layout) if fitting is None else ():
            fitting, need = choose_recompute(planner, lean)
            if fitting is not None:
                break
        if fitting is None and need <= planner.capacity:
            fail(f"needs more than the {request.host_bytes / GIB:.0f} GiB of host memory of a GPU", layout.name())
            continue
        if fitting is None:
            fail(f"needs {_rounded_gib(need, request)} GiB", layout.name())
            continue
        ranked.append(planner.forecast(*fitting))
    ranked.sort(key=lambda forecast: (-forecast.tokens_per_second, forecast.memory.total, forecast.layout.name()))
    failures = tuple(Failure(reason, count, examples[reason]) for reason, count in reasons.most_common())
    return SearchResult(request, tuple(ranked), failures, num_candidates)


def _illegal_whatever_is_recomputed(request: PlanRequest, layout: Layout) -> str | None:
    """The reason of the last mode of recomputation; None where the engine runs one of them."""
    reason = None
    for mode in _modes(request):
        reason = request.illegal_reason(replace(layout, recompute=mode))
        if reason is None:
            return None
    return reason


def _modes(request: PlanRequest) -> tuple[Recompute, ...]:
    """The fixed recomputation, or those of the framework, the cheapest first."""
    return (request.fixed.recompute,) if request.fixed.recompute else request.framework.recomputes


def search_with_offload(request: PlanRequest) -> SearchResult:
    """The search; where nothing fits and nothing is offloaded, with the optimizer's state in host memory, and where
    that does not fit either with the layers' weights there too."""
    plan = search(request)
    offloads = (OffloadConfig(optimizer="auto"), OffloadConfig(optimizer="auto", parameters="host"))
    may_offload = request.framework.is_ours and request.offload == ON_DEVICE
    for offload in offloads if may_offload and not plan.ranked else ():
        trial = search(replace(request, offload=offload))
        if trial.ranked:
            return trial
    return plan


def _with_less_state(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    """Layouts by which our engine lowers a pipeline's memory: reduce the gradients of each micro-batch, and also give
    up the weights between the passes."""
    if not request.framework.is_ours or layout.pipeline == 1 or layout.shard * layout.context == 1:
        return
    for reshard in (False, True):
        lean = replace(layout, reduce_each=True, reshard=reshard)
        if request.illegal_reason(lean) is None:
            yield lean


def choose_recompute(planner: Planner, layout: Layout) -> tuple[tuple[Layout, Memory] | None, float]:
    """((layout, memory) with the cheapest policy of activations that fits or None, bytes of the last mode that was
    tried). Where not all are kept, swaps to host memory are compared with the cheapest recomputation by their time."""
    recomputed, need = _recomputed(planner, layout)
    if planner.request.fixed.recompute or not planner.request.framework.swaps:
        return recomputed, need
    if recomputed is not None and recomputed[0].recompute == "none":
        return recomputed, need
    others = [_fitting(planner, replace(layout, recompute=mode)) for mode in SWAPS]
    fitting = [candidate for candidate in (recomputed, *others) if candidate is not None]
    return min(fitting, key=lambda candidate: planner.forecast(*candidate).time.total, default=None), need


def _fitting(planner: Planner, layout: Layout) -> tuple[Layout, Memory] | None:
    """The layout with its planned share of swapped tokens, and its memory; None if it is illegal or does not fit."""
    if planner.request.illegal_reason(layout) is not None:
        return None
    shared = planner.with_share(layout)
    memory = planner.memory(shared, planner.split_points(layout, planner.placement(layout)))
    fits = memory.total <= planner.capacity and memory.host <= planner.request.host_bytes
    return (shared, memory) if fits else None


def _recomputed(planner: Planner, layout: Layout) -> tuple[tuple[Layout, Memory] | None, float]:
    """The cheapest of the framework's recomputations that fits, or the fixed policy."""
    need = 0.0
    split_points = planner.split_points(layout, planner.placement(layout))
    # From the cheapest: recomputation only adds work, so the first mode that fits is the fastest.
    modes = _modes(planner.request)
    minimum = planner.memory(planner.with_share(replace(layout, recompute=modes[-1])), split_points).total
    if minimum > MAX_OVERSUBSCRIPTION * planner.capacity:
        return None, minimum
    for mode in modes:
        if mode == "operators" and planner.request.shape.has_experts:  # its memory is not forecast
            continue
        if planner.request.illegal_reason(replace(layout, recompute=mode)) is not None:
            continue
        candidate = planner.with_share(replace(layout, recompute=mode))
        memory = planner.memory(candidate, split_points)
        need = memory.total
        if need <= planner.capacity and memory.host <= planner.request.host_bytes:
            return (candidate, memory), need
    return None, need


def _rounded_gib(num_bytes: float, request: PlanRequest) -> str:
    """Rounded coarsely, so that similar failures are counted together: above the usable memory, up to 100, 200, 400."""
    usable, bound = request.usable_bytes / GIB, 100
    while num_bytes > bound * GIB or bound <= usable:
        bound *= 2
    return f"more than the usable {usable:.1f}, up to {bound},"[:-1]


def min_gpus(request: PlanRequest, max_gpus: int = 1 << 17) -> int | None:
    """The minimum number of GPUs on which a layout fits, in whole nodes beyond the first. None above `max_gpus`."""
    node = request.hardware.node_gpus
    counts = [n for n in range(1, node) if node % n == 0]
    count = node
    while count <= max_gpus:
        counts.append(count)
        count = ceil(count * 1.25 / node) * node if count < 64 * node else count * 2
    for count in counts:
        if request.hardware.gpus is None or count <= request.hardware.gpus:
            trial = replace(request, gpus=count, fixed=replace(request.fixed, recompute="full", wide=False))
            if _fits(trial):
                return count
    return None


def _fits(request: PlanRequest) -> bool:
    planner = Planner(request)
    for layout in open_layouts(request, lambda reason, example: None):
        if (
            _illegal_whatever_is_recomputed(request, layout) is None
            and choose_recompute(planner, layout)[0] is not None
        ):
            return True
    return False


def nothing_fits(plan: SearchResult) -> str:
    """The error message where no layout fits: why, the minimum number of GPUs, and what to change."""
    request = plan.request
    size = f"{parameter_count(request.shape) / 1e9:.1f} billion parameters"
    machine = f"{request.gpus} x {request.hardware.name}"
    min_memory = _min_memory_layout(request)
    if min_memory is None:
        why = "; ".join(f"{f.reason} ({f.count} layouts, such as {f.example})" for f in plan.failures[:3])
        return f"no layout of {size} on {machine} is legal: {why}"
    layout, need = min_memory
    memory = request.hardware.device.memory_gib
    usable = f"{request.usable_bytes / GIB:.1f} of its {memory:.1f} GiB are usable"
    margin = f"--memory-margin {request.memory_margin:g}"
    fixes = ["a shorter --sequence-length", "a smaller --batch-tokens where the micro-batch cannot be smaller"]
    if not request.offload.active and request.framework.data_parallel == "fsdp":
        fixes.insert(0, "--offload (the optimizer's state on the host)")
    count = min_gpus(request)
    enough = f"{count} GPUs are enough" if count else "not even 131,072 GPUs are enough"
    return (
        f"no legal layout of {size} fits {machine}: the one that needs the least memory, {layout.name()}, "
        f"needs {need / GIB:,.1f} GiB on one GPU, and {usable} ({margin}). {enough}; or try "
        f"{', '.join(fixes)}, or GPUs with more memory"
    )


def _min_memory_layout(request: PlanRequest) -> tuple[Layout, float] | None:
    """The legal layout that needs the least memory, with the strongest recomputation, and its bytes."""
    planner = Planner(request)
    mode = _modes(request)[-1]
    legal = (
        replace(layout, recompute=mode)
        for layout in open_layouts(request, lambda reason, example: None)
        if request.illegal_reason(replace(layout, recompute=mode)) is None
    )
    needs = [(planner.memory(layout).total, layout.name(), layout) for layout in legal]
    return (min(needs)[2], min(needs)[0]) if needs else None
