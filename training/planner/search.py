"""Every legal layout of a model on a machine, weighed, timed and ranked; those that fail with the reason."""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

from gristmill.foundation.errors import RecipeError
from gristmill.training.costs.flops import step_flops
from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.costs.parameters import parameter_count
from gristmill.training.costs.stage_splitting import balance_by_speed, rank_of_stage
from gristmill.training.planner.activations import Numbers
from gristmill.training.planner.candidates import open_layouts
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.legality import NOT_BUILT, SPLIT_BACKWARD, objection
from gristmill.training.planner.memory import Memory, MemoryModel
from gristmill.training.planner.placement import Placement, naive_wires, place
from gristmill.training.planner.plan_request import PlanRequest, check
from gristmill.training.planner.rates import Rates
from gristmill.training.planner.step_time import StepModel, StepTime

# A layout that needs so much more than there is under the strongest recomputation fits under no other.
HOPELESS = 1.5
# Of |forecast / published - 1| over the published runs of other programs and machines that nothing was fitted to: four
# of five are below (benchmarks/planner.py prints all; tests/benchmarks/test_published.py checks it).
THROUGHPUT_ERROR = 0.12
# What tests allow between the forecast of activations and what autograd keeps (tests/training/planner).
MOVING_MEMORY_ERROR = 0.05


@dataclass(frozen=True)
class Forecast:
    """One layout with everything that is forecast of it. Throughput counts all GPUs; memory is the fullest rank's."""

    layout: Layout
    time: StepTime
    memory: Memory
    tokens_per_second: float
    mfu: float
    placement: Placement
    cuts: tuple[int, ...] | None = None

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Where four of five published runs that were never fitted to lie around their forecasts."""
        return self.tokens_per_second / (1 + THROUGHPUT_ERROR), self.tokens_per_second / (1 - THROUGHPUT_ERROR)

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes of the fullest rank: what is kept all through the step is exact, what comes and goes is not."""
        moving = MOVING_MEMORY_ERROR * self.memory.moving
        return self.memory.total - moving, self.memory.total + moving

    def tflops_per_gpu(self, shape: ModelShape) -> float:
        """Model FLOPs (attention in full, nothing recomputed) a second on each GPU, in TFLOP/s."""
        return step_flops(shape, 1) * self.tokens_per_second / shape.sequence_length / self.layout.gpus / 1e12


@dataclass(frozen=True)
class Failure:
    """A reason, how many layouts it stopped, and one of them."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class SearchResult:
    """ranked: the fastest first. weighed: how many layouts were looked at."""

    job: PlanRequest
    ranked: tuple[Forecast, ...]
    failures: tuple[Failure, ...]
    weighed: int

    @property
    def best(self) -> Forecast:
        """Raises RecipeError where nothing fits, with the mend."""
        if not self.ranked:
            raise RecipeError(nothing_fits(self))
        return self.ranked[0]


class Planner:
    """The models of time and memory of one job; layouts are weighed through it."""

    def __init__(self, job: PlanRequest) -> None:
        check(job)
        self.job = job
        self.rates = Rates(job.hardware, job.sustained, job.float8)
        self.steps = StepModel(job.shape, self.rates, job.software, job.offload)
        self.memories = MemoryModel(job.shape, job.software, Numbers(), job.offload)
        self.capacity = job.usable_bytes
        self.flops = step_flops(job.shape, job.samples)
        self._placements: dict[Layout, Placement] = {}

    def memory(self, layout: Layout, cuts: tuple[int, ...] | None = None) -> Memory:
        """Of the fullest rank."""
        return self.memories.fullest(layout, self.steps.held(layout, cuts), layout.microbatches(self.job.samples))

    def memory_by_rank(self, layout: Layout, cuts: tuple[int, ...] | None = None) -> list[Memory]:
        """Of every pipeline rank."""
        return self.memories.ranks(layout, self.steps.held(layout, cuts), layout.microbatches(self.job.samples))

    def placement(self, layout: Layout) -> Placement:
        key = replace(layout, micro_batch=1, recompute="none", virtual=1, schedule="1f1b", sequence_parallel=False)
        if key not in self._placements:
            self._placements[key] = place(layout, self.rates)
        return self._placements[key]

    def cuts(self, layout: Layout, placement: Placement) -> tuple[int, ...] | None:
        """Uneven cuts where the stages' machines are of uneven speed; None leaves the engine its own rule."""
        if len(set(placement.speeds)) < 2:
            return None
        passes, _, last = self.steps.passes(layout, placement.wires)
        costs = [one.forward.seconds + one.backward.seconds for one in passes]
        ends = last.forward.seconds + last.backward.seconds
        ranks = [rank_of_stage(stage, layout.pipeline, layout.schedule) for stage in range(layout.stages)]
        speeds = [placement.speeds[rank] for rank in ranks]
        return balance_by_speed([costs[kind] for kind in self.job.shape.kinds], ends, speeds)

    def forecast(self, layout: Layout, memory: Memory | None = None, naive: bool = False) -> Forecast:
        """Of one layout, fitting or not. naive: with an order of ranks that knows nothing of clusters."""
        placement = self.placement(layout)
        if naive:
            placement = replace(placement, wires=naive_wires(layout, self.rates), rank_order=None)
        cuts = self.cuts(layout, placement)
        time = self.steps.step(layout, self.job.samples, cuts, placement.wires, placement.speeds)
        tokens = self.job.samples * self.job.shape.sequence_length / time.total
        mfu = self.flops / time.total / layout.gpus / self.rates.peak
        return Forecast(layout, time, memory or self.memory(layout, cuts), tokens, mfu, placement, cuts)


def search(job: PlanRequest) -> SearchResult:
    """Ranks every legal layout that fits."""
    planner = Planner(job)
    ranked: list[Forecast] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    weighed = 0

    def fail(reason: str, example: str) -> None:
        reasons[reason] += 1
        examples.setdefault(reason, example)

    for layout in open_layouts(job, fail):
        weighed += 1
        reason = objection(layout, job.shape, job.samples)
        if reason is not None:
            fail(reason, layout.name())
            continue
        fitting, need = lightest_fitting(planner, layout)
        if fitting is None:
            fail(f"needs {_rounded_gib(need, job)} GiB", layout.name())
            continue
        ranked.append(planner.forecast(*fitting))
    ranked.sort(key=lambda one: (-one.tokens_per_second, one.memory.total, one.layout.name()))
    failures = tuple(Failure(reason, count, examples[reason]) for reason, count in reasons.most_common())
    return SearchResult(job, tuple(ranked), failures, weighed)


def lightest_fitting(planner: Planner, layout: Layout) -> tuple[tuple[Layout, Memory] | None, float]:
    """(the layout with the least recomputation that fits, and its memory; bytes of the last that was tried)."""
    pins, need = planner.job.pins, 0.0
    cuts = planner.cuts(layout, planner.placement(layout))
    # In the order of what they cost: the first that fits is the fastest, since all they do is add work.
    modes = (pins.recompute,) if pins.recompute else planner.job.software.recomputes
    least = planner.memory(replace(layout, recompute=modes[-1]), cuts).total
    if least > HOPELESS * planner.capacity:
        return None, least
    for mode in modes:
        if mode == "operators" and layout.schedule in SPLIT_BACKWARD:
            continue
        one = replace(layout, recompute=mode)
        memory = planner.memory(one, cuts)
        need = memory.total
        if need <= planner.capacity:
            return (one, memory), need
    return None, need


def _rounded_gib(num_bytes: float, job: PlanRequest) -> str:
    """Coarse, so that failures of one kind are counted together: more than is usable, then up to 100, 200, 400."""
    usable, bound = job.usable_bytes / GIB, 100
    while num_bytes > bound * GIB or bound <= usable:
        bound *= 2
    return f"more than the usable {usable:.1f}, up to {bound},"[:-1]


def smallest_count(job: PlanRequest, most: int = 1 << 17) -> int | None:
    """The fewest GPUs on which some layout fits, in whole nodes beyond the first. None if not even `most` do."""
    node = job.hardware.node_gpus
    counts = [n for n in range(1, node) if node % n == 0]
    count = node
    while count <= most:
        counts.append(count)
        count = ceil(count * 1.25 / node) * node if count < 64 * node else count * 2
    for count in counts:
        if job.hardware.gpus is None or count <= job.hardware.gpus:
            trial = replace(job, gpus=count, pins=replace(job.pins, recompute="full", wide=False))
            if _fits(trial):
                return count
    return None


def _fits(job: PlanRequest) -> bool:
    planner = Planner(job)
    for layout in open_layouts(job, lambda reason, example: None):
        if objection(layout, job.shape, job.samples) is None and lightest_fitting(planner, layout)[0] is not None:
            return True
    return False


def nothing_fits(plan: SearchResult) -> str:
    """The sentence for a model that no layout trains: why, the smallest count that would do, and what to change."""
    job = plan.job
    size = f"{parameter_count(job.shape) / 1e9:.1f} billion parameters"
    machine = f"{job.gpus} x {job.hardware.name}"
    leanest = _leanest(job)
    if leanest is None:
        known = [f for f in plan.failures if NOT_BUILT not in f.reason] or plan.failures
        why = "; ".join(f"{f.reason} ({f.count} layouts, such as {f.example})" for f in known[:3])
        return f"no layout of {size} on {machine} is legal: {why}"
    layout, need = leanest
    memory = job.hardware.device.memory_gib
    usable = (
        f"{job.usable_bytes / GIB:.1f} of its {memory:.1f} GiB may be filled (--memory-margin {job.memory_margin:g})"
    )
    mends = ["a shorter --sequence-length", "a smaller --batch-tokens where the micro-batch cannot shrink"]
    if not job.offload and job.software.data_parallel == "fsdp":
        mends.insert(0, "--offload (the optimizer's state on the host)")
    count = smallest_count(job)
    enough = f"{count} GPUs would do" if count else "no count up to 131,072 GPUs would do"
    return (
        f"no legal layout of {size} fits {machine}: the leanest, {layout.name()}, needs {need / GIB:,.1f} GiB on its "
        f"fullest GPU, and {usable}. {enough}; or try {', '.join(mends)}, or GPUs with more memory"
    )


def _leanest(job: PlanRequest) -> tuple[Layout, float] | None:
    """The legal layout that needs least memory, with everything recomputed, and its bytes."""
    planner = Planner(job)
    mode = job.pins.recompute or job.software.recomputes[-1]
    legal = (
        replace(layout, recompute=mode)
        for layout in open_layouts(job, lambda reason, example: None)
        if objection(layout, job.shape, job.samples) is None
    )
    needs = [(planner.memory(layout).total, layout.name(), layout) for layout in legal]
    return (min(needs)[2], min(needs)[0]) if needs else None
