"""When Python looks for unreachable cycles of objects: not while modules are imported, where there are none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two collections. mypy, a program that also starts often, sets 200,000.
NUM_NEW_OBJECTS = 100_000
_USUAL = gc.get_threshold()


def delay_collections() -> None:
    """Until `keep_loaded`, Python collects rarely: a tenth of the start-up time of a command."""
    gc.set_threshold(NUM_NEW_OBJECTS, *_USUAL[1:])


def keep_loaded() -> None:
    """Python collects as usual again, and leaves the objects that exist now out of it: modules and their contents,
    which live until the process ends. The processes that are forked from this one share their memory."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
