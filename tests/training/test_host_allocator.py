"""Memory of freed tensors is kept for the next step."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from gristmill.training.host_allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def allocate(rounds):
    for _ in range(rounds):
        torch.ones(64 << 20, dtype=torch.uint8)

allocate(10)  # until the heap has a place of this size and alignment
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(choice: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, choice], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_tensor_as_large_as_a_freed_one_takes_its_memory():
    assert page_faults("keep") * 10 < page_faults("return")
