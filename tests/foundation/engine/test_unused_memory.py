import json
import subprocess
import sys

# A process of its own: in one that has run other tests, the arrays would fill memory that is already held.
SCRIPT = """
import json, numpy, psutil, pyarrow
from gristmill.foundation.engine.unused_memory import release_unused_memory

def resident():
    return psutil.Process().memory_info().rss

before = resident()
held = [pyarrow.array(numpy.full(4096, number)).cast(pyarrow.string()) for number in range(2000)]
used = resident()
last = held[-1]
del held
release_unused_memory()
print(json.dumps({"before": before, "used": used, "after": resident(), "last": last[0].as_py()}))
"""


def test_what_was_freed_goes_back_to_the_system():
    memory = json.loads(subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True).stdout)
    assert memory["used"] > memory["before"] + 50_000_000
    assert memory["after"] < memory["used"] - 50_000_000
    assert memory["last"] == "1999"
