"""Shared by the tests of training: a pool of forked processes, and data that needs no files."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gristmill.training.parallel.forked import ForkedPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ForkedPool]:
    pool = ForkedPool(8)
    yield pool
    pool.close()
