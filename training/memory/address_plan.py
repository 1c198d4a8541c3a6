"""Addresses of blocks of memory whose lifetimes are known before (offline dynamic storage allocation, as in MEMO): a
mixed integer programme, with a greedy plan where that is too large, and the caching allocator for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

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

    Minimise P with A_i + s_i <= P, and for each pair alive together A_i + s_i <= A_j or A_j + s_j <= A_i, by a binary
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
