"""Addresses of blocks of memory whose lifetimes are known before (offline dynamic storage allocation, as in MEMO): a
mixed integer programme, with a greedy plan where that is too large, and the caching allocator for comparison."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_PAIRS = 600  # of blocks alive together; with more the greedy plan is taken
SECONDS = 10.0  # that the programme may take; its best plan so far counts

# torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are multiples of 512 bytes; up to 1 MiB come from
# segments of 2 MiB; up to 10 MiB from segments of 20 MiB; larger ones have segments of multiples of 2 MiB.
UNIT, SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, ROUND = 512, 2**20, 2**21, 10 * 2**20, 20 * 2**20, 2**21


@dataclass(frozen=True)
class Block:
    """size bytes from event `start` up to event `end` of a trace, which is not included."""

    start: int
    end: int
    size: int

    def meets(self, other: "Block") -> bool:
        """Whether both are alive at some time."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class AddressPlan:
    """addresses: of each block. optimal: no plan has a lower peak."""

    addresses: tuple[int, ...]
    peak: int
    optimal: bool


def live_peak(blocks: Sequence[Block]) -> int:
    """The most bytes alive at once, below which no plan can be."""
    changes = sorted([(block.start, block.size) for block in blocks] + [(block.end, -block.size) for block in blocks])
    live = peak = 0
    for _, size in changes:
        live += size
        peak = max(peak, live)
    return peak


def replay(blocks: Sequence[Block], addresses: Sequence[int]) -> int:
    """The peak of the plan as the trace is played. Raises ValueError where two blocks lie on each other."""
    events = sorted((time, opens, place) for place, block in enumerate(blocks) for time, opens in _ends(block))
    live: set[int] = set()
    peak = 0
    for _, opens, place in events:
        if not opens:
            live.discard(place)
            continue
        start, end = addresses[place], addresses[place] + blocks[place].size
        for other in live:
            if start < addresses[other] + blocks[other].size and addresses[other] < end:
                raise ValueError(f"blocks {other} and {place} overlap at address {max(start, addresses[other])}")
        live.add(place)
        peak = max(peak, end)
    return peak


def _ends(block: Block) -> list[tuple[int, bool]]:
    return [(block.start, True), (block.end, False)] if block.end > block.start else []


def greedy_plan(blocks: Sequence[Block]) -> AddressPlan:
    """The largest block first, each at the lowest address that is free over its life."""
    addresses = [0] * len(blocks)
    placed: list[int] = []
    for place in sorted(range(len(blocks)), key=lambda one: (-blocks[one].size, one)):
        taken = sorted(
            (addresses[other], addresses[other] + blocks[other].size)
            for other in placed
            if blocks[place].meets(blocks[other])
        )
        address = 0
        for start, end in taken:
            if start - address >= blocks[place].size:
                break
            address = max(address, end)
        addresses[place] = address
        placed.append(place)
    peak = max((address + block.size for address, block in zip(addresses, blocks, strict=True)), default=0)
    return AddressPlan(tuple(addresses), peak, peak == live_peak(blocks))


def best_plan(blocks: Sequence[Block]) -> AddressPlan:
    """The plan with the lowest peak that the programme finds in its time; the greedy one where it finds none better.

    Minimize P with A_i + s_i <= P, and for each pair alive together A_i + s_i <= A_j or A_j + s_j <= A_i, by a binary
    z_ij and the greedy peak as the large number."""
    greedy = greedy_plan(blocks)
    pairs = [(i, j) for i, j in combinations(range(len(blocks)), 2) if blocks[i].meets(blocks[j])]
    if greedy.optimal or len(pairs) > MAX_PAIRS:
        return greedy
    found = _solve(blocks, pairs, greedy.peak)
    return greedy if found is None or found.peak >= greedy.peak else found


def _solve(blocks: Sequence[Block], pairs: Sequence[tuple[int, int]], bound: int) -> AddressPlan | None:
    """Variables: addresses, a binary for each pair, the peak; in units of the greedy peak, for the solver's
    tolerances."""
    count, peak = len(blocks), len(blocks) + len(pairs)
    sizes = np.array([block.size for block in blocks]) / bound
    rows: list[tuple[int, int, float]] = []
    upper: list[float] = []
    for block in range(count):  # A + s <= P
        rows += [(len(upper), block, 1), (len(upper), peak, -1)]
        upper.append(-sizes[block])
    for number, (i, j) in enumerate(pairs):
        for first, second, sign in ((i, j, 1), (j, i, -1)):  # A_first + s_first <= A_second where z says so
            rows += [(len(upper), first, 1), (len(upper), second, -1), (len(upper), count + number, sign)]
            upper.append((1 if sign > 0 else 0) - sizes[first])
    at, column, value = (np.array(part) for part in zip(*rows, strict=True))
    matrix = coo_array((value.astype(float), (at, column)), shape=(len(upper), peak + 1)).tocsr()
    binary = np.zeros(peak + 1)
    binary[count:peak] = 1
    low = np.zeros(peak + 1)
    low[peak] = live_peak(blocks) / bound
    found = milp(
        c=np.eye(peak + 1)[peak],
        constraints=LinearConstraint(matrix, -np.inf, np.array(upper)),
        integrality=binary,
        bounds=Bounds(low, np.ones(peak + 1)),
        options={"time_limit": SECONDS},
    )
    if found.x is None:
        return None
    # The solver's order of the blocks, at exact addresses: each on the highest of those alive below it.
    addresses = [0] * count
    done: list[int] = []
    for place in sorted(range(count), key=lambda one: (found.x[one], one)):
        below = [other for other in done if blocks[place].meets(blocks[other])]
        addresses[place] = max((addresses[other] + blocks[other].size for other in below), default=0)
        done.append(place)
    top = max(address + block.size for address, block in zip(addresses, blocks, strict=True))
    return AddressPlan(tuple(addresses), top, found.status == 0)


def plan_by_layer(layers: Sequence[Sequence[Block]]) -> tuple[list[tuple[int, ...]], AddressPlan]:
    """Each layer by itself, then the layers as one block each: (addresses of each layer's blocks, the plan of the
    layers)."""
    plans = [best_plan(blocks) for blocks in layers]
    whole = best_plan(
        [
            Block(min(one.start for one in blocks), max(one.end for one in blocks), plan.peak)
            for blocks, plan in zip(layers, plans, strict=True)
        ]
    )
    addresses = [
        tuple(base + address for address in plan.addresses) for base, plan in zip(whole.addresses, plans, strict=True)
    ]
    return addresses, whole


def caching_peak(blocks: Sequence[Block]) -> int:
    """Bytes of segments that torch's caching allocator asks the device for as the trace is played."""
    events = sorted((time, opens, place) for place, block in enumerate(blocks) for time, opens in _ends(block))
    free: list[tuple[int, int, int]] = []  # (segment, start, size)
    held: dict[int, tuple[int, int, int]] = {}
    segments: list[int] = []
    for _, opens, place in events:
        if not opens:
            free = _merged([*free, held.pop(place)])
            continue
        size = -(-max(1, blocks[place].size) // UNIT) * UNIT
        small = size <= SMALL
        fits = [one for one in free if one[2] >= size and (segments[one[0]] == SMALL_SEGMENT) == small]
        if not fits:
            large = MIDDLE_SEGMENT if size < MIDDLE else -(-size // ROUND) * ROUND
            segments.append(SMALL_SEGMENT if small else large)
            fits = [(len(segments) - 1, 0, segments[-1])]
            free.append(fits[0])
        segment, start, room = chosen = min(fits, key=lambda one: (one[2], one))
        free.remove(chosen)
        left = room - size
        if left >= UNIT if small else left > SMALL:
            free.append((segment, start + size, left))
            room = size
        held[place] = segment, start, room
    return sum(segments)


def _merged(free: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours of one segment become one."""
    found: list[tuple[int, int, int]] = []
    for segment, start, size in sorted(free):
        if found and found[-1][0] == segment and found[-1][1] + found[-1][2] == start:
            found[-1] = segment, found[-1][1], found[-1][2] + size
        else:
            found.append((segment, start, size))
    return found


# The tensors that a computation allocates and frees, in order: the trace that addresses are planned for.


class _Recorder(TorchDispatchMode):
    """Counts an event for each new storage and for each that is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.sizes: list[int] = []
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}
        self._known: dict[int, int] = {}  # storage -> block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {_identity(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _identity(each) not in own and _identity(each) not in self._known:
                self._allocated(each)
        return result

    def _allocated(self, tensor: Tensor) -> None:
        storage, block = tensor.untyped_storage(), len(self.sizes)
        if not storage.nbytes():
            return
        identity = _identity(tensor)
        self._known[identity] = block
        self.starts.append(self.events)
        self.sizes.append(storage.nbytes())
        self.events += 1
        weakref.finalize(storage, self._freed, identity, block)

    def _freed(self, identity: int, block: int) -> None:
        self._known.pop(identity, None)
        self.ends[block] = self.events
        self.events += 1


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def recorded() -> Iterator[Callable[[], list[Block]]]:
    """Within it, what is allocated is recorded; afterwards the call returns the blocks, those that still live up to the
    end of the trace."""
    recorder = _Recorder()
    with recorder:
        yield lambda: [
            Block(start, recorder.ends.get(place, recorder.events), size)
            for place, (start, size) in enumerate(zip(recorder.starts, recorder.sizes, strict=True))
        ]


def layer_trace(compute: Callable[[Tensor], Tensor], x: Tensor) -> list[Block]:
    """The transient blocks of one layer's forward pass without gradients: those that are freed before its end."""
    with torch.no_grad(), recorded() as blocks:
        output = compute(x)
    end = max(block.end for block in blocks())
    found = [block for block in blocks() if block.end < end]
    del output
    return found
