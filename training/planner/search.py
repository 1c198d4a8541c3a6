"""Every legal layout of a model on a machine, weighed, timed and ranked; those that fail with the reason."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from gristmill.data_pipeline.errors import RecipeError
from gristmill.training.config import STAGES_PER_RANK, Recompute, Schedule, divisors
from gristmill.training.planner.activations import Numbers
from gristmill.training.planner.flops import step_flops
from gristmill.training.planner.hardware import GIB, Hardware
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.legality import objection, tensor_objection
from gristmill.training.planner.memory import Memory, MemoryModel
from gristmill.training.planner.parameters import parameter_count
from gristmill.training.planner.placement import Placement, naive_wires, place
from gristmill.training.planner.rates import FITTED, Rates, Sustained
from gristmill.training.planner.shape import Shape
from gristmill.training.planner.software import GRISTMILL, Software
from gristmill.training.planner.stages import balanced_cuts
from gristmill.training.planner.step_time import StepModel, StepTime

# A layout that needs so much more than there is under the strongest recomputation fits under no other.
HOPELESS = 1.5
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MOST_STAGES_A_RANK = 8


@dataclass(frozen=True)
class Pins:
    """Choices that are made already; None leaves one open. wide: try the settings that seldom win, too."""

    tensor: int | None = None
    pipeline: int | None = None
    replicate: int | None = None
    shard: int | None = None
    context: int = 1
    virtual: int | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    wide: bool = False


@dataclass(frozen=True)
class Job:
    """What is to be planned. samples: of one step; tokens: of the whole training, for days and cost."""

    shape: Shape
    hardware: Hardware
    gpus: int
    samples: int
    tokens: int | None = None
    software: Software = GRISTMILL
    sustained: Sustained = FITTED
    float8: bool = False
    offload: bool = False
    pins: Pins = field(default_factory=Pins)


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

    def tflops_per_gpu(self, shape: Shape) -> float:
        """Model FLOPs (attention in full, nothing recomputed) a second on each GPU, in TFLOP/s."""
        return step_flops(shape, 1) * self.tokens_per_second / shape.context / self.layout.gpus / 1e12


@dataclass(frozen=True)
class Failure:
    """A reason, how many layouts it stopped, and one of them."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Plan:
    """ranked: the fastest first. weighed: how many layouts were looked at."""

    job: Job
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

    def __init__(self, job: Job) -> None:
        check(job)
        self.job = job
        self.rates = Rates(job.hardware, job.sustained, job.float8)
        self.steps = StepModel(job.shape, self.rates, job.software, job.offload)
        self.memories = MemoryModel(job.shape, job.software, Numbers(), job.offload)
        self.capacity = job.hardware.device.memory_gib * GIB
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
        if len(set(placement.speeds)) < 2 or layout.virtual > 1:
            return None
        passes, _, last = self.steps.passes(layout, placement.wires)
        costs = [one.forward.seconds + one.backward.seconds for one in passes]
        ends = last.forward.seconds + last.backward.seconds
        return balanced_cuts(
            [costs[kind] for kind in self.job.shape.kinds], 0.0, ends, layout.pipeline, placement.speeds
        )

    def forecast(self, layout: Layout, memory: Memory | None = None, naive: bool = False) -> Forecast:
        """Of one layout, fitting or not. naive: with an order of ranks that knows nothing of clusters."""
        placement = self.placement(layout)
        if naive:
            placement = replace(placement, wires=naive_wires(layout, self.rates), rank_order=None)
        cuts = self.cuts(layout, placement)
        time = self.steps.step(layout, self.job.samples, cuts, placement.wires, placement.speeds)
        tokens = self.job.samples * self.job.shape.context / time.total
        mfu = self.flops / time.total / layout.gpus / self.rates.peak
        return Forecast(layout, time, memory or self.memory(layout, cuts), tokens, mfu, placement, cuts)


def check(job: Job) -> None:
    """Raises RecipeError where a job cannot be planned at all."""
    if job.gpus < 1:
        raise RecipeError(f"--gpus {job.gpus}: at least one GPU is needed")
    if job.samples < 1:
        raise RecipeError(
            f"a batch of {job.samples} samples; --batch-tokens must be at least the context, {job.shape.context}"
        )
    limit = job.hardware.gpus
    if limit is not None and job.gpus > limit:
        raise RecipeError(f"--gpus {job.gpus}, but the clusters of {job.hardware.name} have {limit} in all")


def search(job: Job) -> Plan:
    """Ranks every legal layout that fits."""
    planner = Planner(job)
    ranked: list[Forecast] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    weighed = 0

    def fail(reason: str, example: str) -> None:
        reasons[reason] += 1
        examples.setdefault(reason, example)

    for layout in _open_layouts(job, fail):
        weighed += 1
        reason = objection(layout, job.shape, job.samples)
        if reason is not None:
            fail(reason, layout.name())
            continue
        fitting, need = lightest_fitting(planner, layout)
        if fitting is None:
            fail(f"needs {_rounded_gib(need)} of {job.hardware.device.memory_gib:.0f} GiB", layout.name())
            continue
        ranked.append(planner.forecast(*fitting))
    ranked.sort(key=lambda one: (-one.tokens_per_second, one.memory.total, one.layout.name()))
    failures = tuple(Failure(reason, count, examples[reason]) for reason, count in reasons.most_common())
    return Plan(job, tuple(ranked), failures, weighed)


def lightest_fitting(planner: Planner, layout: Layout) -> tuple[tuple[Layout, Memory] | None, float]:
    """(the layout with the least recomputation that fits, and its memory; bytes of the last that was tried)."""
    pins, need = planner.job.pins, 0.0
    # In the order of what they cost: the first that fits is the fastest, since all they do is add work.
    modes = (pins.recompute,) if pins.recompute else planner.job.software.recomputes
    least = planner.memory(replace(layout, recompute=modes[-1])).total
    if least > HOPELESS * planner.capacity:
        return None, least
    for mode in modes:
        if mode == "operators" and layout.schedule == "zbv":
            continue
        one = replace(layout, recompute=mode)
        memory = planner.memory(one)
        need = memory.total
        if need <= planner.capacity:
            return (one, memory), need
    return None, need


def _open_layouts(job: Job, fail: Callable[[str, str], None]) -> Iterator[Layout]:
    """Every combination of the open choices, recomputation left to what fits."""
    shape, pins, software = job.shape, job.pins, job.software
    node = job.hardware.node_gpus
    for tensor in _choices(pins.tensor, _tensor_sizes(job)):
        sequence_parallel = _sequence_parallel(job, tensor)
        reason = tensor_objection(shape, tensor, sequence_parallel)
        if reason is not None:
            fail(reason, f"tensor {tensor}")
            continue
        if job.gpus % (tensor * pins.context):
            fail(f"tensor x context does not divide {job.gpus} GPUs", f"tensor {tensor} x context {pins.context}")
            continue
        rest = job.gpus // (tensor * pins.context)
        for pipeline in _choices(pins.pipeline, [p for p in divisors(rest) if p <= len(shape.blocks)]):
            if rest % pipeline:
                continue
            data = rest // pipeline
            if job.samples % data:
                example = f"tensor {tensor} x pipeline {pipeline} x data {data}"
                fail(f"{job.samples} samples do not split over the data ranks", example)
                continue
            for shard in _shards(data, tensor * pins.context, node, pins, software):
                for schedule, virtual in _schedules(pipeline, len(shape.blocks), pins, software):
                    for micro_batch in _choices(pins.micro_batch, _micro_batches(job.samples // data, pins)):
                        for reshard in (False, True) if pipeline == 1 else (False,):
                            yield Layout(
                                tensor=tensor,
                                pipeline=pipeline,
                                replicate=data // shard,
                                shard=shard,
                                context=pins.context,
                                virtual=virtual,
                                micro_batch=micro_batch,
                                schedule=schedule,
                                recompute=pins.recompute or "none",
                                sequence_parallel=sequence_parallel,
                                reshard=reshard,
                            )


def _choices(pinned: int | None, open_choices: Sequence[int]) -> Sequence[int]:
    return open_choices if pinned is None else (pinned,)


def _tensor_sizes(job: Job) -> list[int]:
    """Divisors of the heads within a node, and twice a node's GPUs for one that fits in no other way."""
    most = job.hardware.node_gpus * 2
    return [size for size in divisors(job.shape.model.heads) if size <= most and job.gpus % size == 0]


def _sequence_parallel(job: Job, tensor: int) -> bool:
    if tensor == 1:
        return False
    if job.pins.sequence_parallel is not None:
        return job.pins.sequence_parallel
    return job.software.name != "megatron-2021" and job.shape.context % tensor == 0


def _shards(data: int, inner: int, node: int, pins: Pins, software: Software) -> list[int]:
    """Sizes of the group that shares one copy of the state: all, one node's ranks, none; every divisor when wide."""
    if software.data_parallel != "fsdp":
        return [1]
    if pins.shard is not None:
        return [pins.shard] if data % pins.shard == 0 else []
    if pins.replicate is not None:
        return [data // pins.replicate] if data % pins.replicate == 0 else []
    if pins.wide:
        return divisors(data)
    local = max(1, node // inner)
    sizes = {1, data, local, 8 * local, data // 2}
    return sorted(size for size in sizes if size and data % size == 0)


def _schedules(pipeline: int, layers: int, pins: Pins, software: Software) -> list[tuple[Schedule, int]]:
    """gpipe never beats 1f1b, so it is tried only when asked for."""
    if pipeline == 1:
        return [("1f1b", 1)]
    names: Sequence[Schedule] = (pins.schedule,) if pins.schedule else software.schedules
    if not pins.schedule and pins.virtual:
        names = ("1f1b",) if pins.virtual == 1 else ("interleaved",)
    found: list[tuple[Schedule, int]] = []
    for name in names:
        usual = STAGES_PER_RANK.get(name)
        most = min(MOST_STAGES_A_RANK, layers // pipeline)
        open_virtual = [v for v in range(2, most + 1) if layers % (pipeline * v) == 0] or ([2] if most >= 2 else [])
        virtuals = [usual] if usual else _choices(pins.virtual, open_virtual)
        found += [(name, virtual) for virtual in virtuals if virtual * pipeline <= layers]
    return found


def _micro_batches(share: int, pins: Pins) -> list[int]:
    sizes = divisors(share) if pins.wide else MICRO_BATCHES
    return [size for size in sizes if share % size == 0 and size <= 64] or [1]


def _rounded_gib(num_bytes: float) -> str:
    """Coarse, so that failures of one kind are counted together: up to 100, 200, 400 GiB and so on."""
    bound = 100
    while num_bytes > bound * GIB:
        bound *= 2
    return f"up to {bound}" if bound > 100 else "80 to 100"


def smallest_count(job: Job, most: int = 1 << 17) -> int | None:
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


def _fits(job: Job) -> bool:
    planner = Planner(job)
    for layout in _open_layouts(job, lambda reason, example: None):
        if objection(layout, job.shape, job.samples) is None and lightest_fitting(planner, layout)[0] is not None:
            return True
    return False


def nothing_fits(plan: Plan) -> str:
    """The sentence for a model that fits nowhere: the smallest count that would do, and what else to change."""
    job = plan.job
    count = smallest_count(job)
    size = f"{parameter_count(job.shape) / 1e9:.1f} billion parameters"
    machine = f"{job.gpus} x {job.hardware.name} ({job.hardware.device.memory_gib:.0f} GiB each)"
    head = f"no legal layout of {size} fits {machine}"
    why = "; ".join(f"{f.reason} ({f.count} layouts, such as {f.example})" for f in plan.failures[:3])
    mends = [
        "a shorter --context",
        "a smaller --batch-tokens where the micro-batch cannot shrink",
        "GPUs with more memory",
    ]
    if not job.offload and job.software.data_parallel == "fsdp":
        mends.insert(0, "--offload (the optimizer's state on the host)")
    enough = f"{count} GPUs would do" if count else "no count up to 131,072 GPUs would do"
    return f"{head}: {why}. {enough}; or try {', '.join(mends)}"
