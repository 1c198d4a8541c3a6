"""Memory of freed tensors is kept for the next step."""

import multiprocessing
import platform
import resource

import pytest
import torch

from gristmill.training.host_allocator import keep_freed_memory

ROUNDS, BYTES = 10, 64 << 20


def page_faults(keep: bool, connection) -> None:
    if keep:
        assert keep_freed_memory()
    for _ in range(ROUNDS):  # until the heap has a place of this size and alignment
        torch.ones(BYTES, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        torch.ones(BYTES, dtype=torch.uint8)
    connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_tensor_as_large_as_a_freed_one_takes_its_memory():
    faults = []
    for keep in (False, True):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=page_faults, args=(keep, there))
        process.start()
        faults.append(here.recv())
        process.join()
    without, kept = faults
    assert kept * ROUNDS < without, faults
