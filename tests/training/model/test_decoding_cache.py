"""Memory of slots: what is released is zero again, and takes no memory."""

import re
from pathlib import Path

import pytest
import torch

from gristmill.training.model.decoding_cache import HAS_PAGES, GrownMemory, KVSlots, PagedMemory, SlotRows

pytestmark = pytest.mark.skipif(not HAS_PAGES, reason="pages are given back on Linux alone")
TOKEN_BYTES = 2 * 32 * 4  # so that 16 tokens are a page


def resident_bytes(memory: PagedMemory) -> int:
    """Of the mapping, by the kernel."""
    address, lines = memory.numbers_NCGK.data_ptr(), Path("/proc/self/smaps").read_text().splitlines()
    for index, line in enumerate(lines):
        bounds = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            rss = next(field for field in lines[index:] if field.startswith("Rss:"))
            return int(rss.split()[1]) * 1024
    raise AssertionError("no mapping at the address")


def test_only_written_pages_take_memory_and_released_ones_are_given_back():
    memory = PagedMemory(8, 4000, torch.zeros(1, 1, 2, 32))
    numbers_NCGK = memory.numbers_NCGK
    assert resident_bytes(memory) == 0
    numbers_NCGK[1, :160] = 1
    numbers_NCGK[2, :64] = 2
    assert resident_bytes(memory) == (160 + 64) * TOKEN_BYTES
    assert float(numbers_NCGK[1:3, :1000].sum()) == (160 + 2 * 64) * 64  # reading takes none
    memory.release(1, 32)
    assert resident_bytes(memory) == (32 + 64) * TOKEN_BYTES
    assert float(numbers_NCGK[1].sum()) == 32 * 64 and float(numbers_NCGK[2].sum()) == 2 * 64 * 64
    memory.release(2, 0)
    assert resident_bytes(memory) == 32 * TOKEN_BYTES and not numbers_NCGK[2].any()


@pytest.mark.parametrize("width", [1, 3, 10])
def test_slots_begin_at_pages(width):
    """A token of 24 bytes: releasing a slot whole leaves the numbers of its neighbours."""
    memory = PagedMemory(3, 500, torch.zeros(1, 1, 2, width))
    memory.numbers_NCGK.fill_(1)
    memory.release(1, 0)
    assert not memory.numbers_NCGK[1].any() and memory.numbers_NCGK[[0, 2, 3]].all()


def rows_of(slots, positions):
    positions_BT = torch.tensor(positions)
    return SlotRows(torch.tensor(slots), positions_BT, int(positions_BT.max()) + 1, False, True, False)


@pytest.mark.parametrize("kind", [PagedMemory, GrownMemory])
def test_what_is_written_is_read_whatever_was_swapped_and_copied(kind, monkeypatch):
    monkeypatch.setattr("gristmill.training.model.decoding_cache.HAS_PAGES", kind is PagedMemory)
    slots, generator = KVSlots(4, 600), torch.Generator().manual_seed(0)
    long, short = (torch.randn(1, count, 2, 32, generator=generator) for count in (300, 20))
    padding = torch.full((1, 280, 2, 32), torch.inf)
    keys = torch.cat([long, torch.cat([padding, short], dim=1)])
    slots.write(rows_of([2, 0], [list(range(300)), [-1] * 280 + list(range(20))]), keys, keys + 1)
    assert isinstance(slots.key, kind)

    def key_of(slot, count):
        return slots.read(rows_of([slot], [[count - 1]])).key_BGSK.transpose(1, 2)

    assert torch.equal(key_of(2, 300), long) and torch.equal(key_of(0, 20), short)
    slots.swap(0, 2, 20, 300)
    assert torch.equal(key_of(0, 300), long) and torch.equal(key_of(2, 20), short)
    slots.copy(0, 1, 50)
    slots.release(0, 0)
    assert torch.equal(key_of(1, 50), long[:, :50]) and not key_of(0, 300).any()
    assert torch.equal(slots.read(rows_of([1], [[49]])).value_BGSK.transpose(1, 2), long[:, :50] + 1)
    assert key_of(2, 100)[:, :20].isfinite().all()
