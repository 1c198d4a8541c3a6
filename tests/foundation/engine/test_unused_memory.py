import numpy as np
import psutil
import pyarrow as pa

from gristmill.foundation.engine.unused_memory import release_unused_memory


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_what_was_freed_goes_back_to_the_system():
    before = resident()
    held = [pa.array(np.full(4096, number)).cast(pa.string()) for number in range(2000)]
    used = resident()
    assert used > before + 50_000_000
    last = held[-1]
    del held
    release_unused_memory()
    assert resident() < used - 50_000_000
    assert last[0].as_py() == "1999"
