"""Shared by the tests of training: a pool of forked processes."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gristmill.training.parallel.forked import ForkedPool

POOL = pytest.StashKey[ForkedPool]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """After all test modules are loaded, before anything is computed in this process."""
    if (
        any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
        and not session.config.option.collectonly
    ):
        session.config.stash[POOL] = ForkedPool(8)


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> ForkedPool:
    return pytestconfig.stash[POOL]
