"""Blocks that repeat over the pages of one host: their keys, and the table of those that are boilerplate.

A host's key is the XXH3-64 of its name, a block's that of its text, seeded with the host's."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from gristmill.foundation.errors import InputError


class RepeatedBlocks(NamedTuple):
    """hosts, keys: uint64[K], ordered by key, then host."""

    hosts: np.ndarray
    keys: np.ndarray

    def mask(self, host: str, texts: Sequence[bytes]) -> np.ndarray:
        """bool[N]: which of the host's blocks are in the table. texts: in UTF-8."""
        wanted, keys = np.uint64(host_key(host)), block_keys(host, texts)
        first, last = (np.searchsorted(self.keys, keys, side) for side in ("left", "right"))
        repeated = first < last
        for k in np.flatnonzero(repeated).tolist():  # a key stands for two hosts only if hashes collide
            repeated[k] = wanted in self.hosts[first[k] : last[k]]
        return repeated


class HostBlocks(NamedTuple):
    """The repeated blocks of a source, and the host that a page is of."""

    repeated: RepeatedBlocks
    host: str

    def mask(self, texts: Sequence[bytes]) -> np.ndarray:
        return self.repeated.mask(self.host, texts)


def host_key(host: str) -> int:
    return xxhash.xxh3_64_intdigest(host.encode("utf-8", "surrogatepass"))


def block_keys(host: str, texts: Sequence[bytes]) -> np.ndarray:
    """uint64[N], none of them 0. texts: of blocks, in UTF-8."""
    seed = host_key(host)
    return np.array([xxhash.xxh3_64_intdigest(text, seed) or 1 for text in texts], np.uint64)


@lru_cache(maxsize=8)
def load_repeated_blocks(path: Path) -> RepeatedBlocks:
    """path: an array uint64[2, K]. It is memory-mapped, so the workers share its memory. Raises InputError if it is
    damaged."""
    try:
        hosts, keys = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no table of repeated blocks ({error}); delete it and run again") from error
    return RepeatedBlocks(hosts, keys)
