"""Memory that a process may still take, and its cores."""

import os

import pytest

from gristmill.foundation import startup
from gristmill.foundation.startup import available_bytes, host_bytes, set_thread_variables, usable_cores

OWN = "4:memory:/slurm/job_7\n1:cpu,cpuacct:/slurm/job_7\n0::/slurm/job_7\n"


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Control groups, which the test writes, of a machine with 8 cores and 5 kB of free memory."""
    info, own, groups = tmp_path / "meminfo", tmp_path / "own", tmp_path / "groups"
    info.write_text("MemTotal:       8 kB\nMemAvailable:      5 kB\n")
    own.write_text(OWN)
    monkeypatch.setattr(startup, "MEMORY_INFO", info)
    monkeypatch.setattr(startup, "OWN_GROUPS", own)
    monkeypatch.setattr(startup, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return groups


def write(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("below", "limit_name", "use_name"),
    [
        (".", "memory.max", "memory.current"),  # a container
        ("slurm/job_7", "memory.max", "memory.current"),
        ("slurm", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory/slurm/job_7", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limit_of_a_control_group_counts(below, limit_name, use_name, groups):
    """Of 4,096 bytes in use the kernel gives up 1,024 before all others."""
    assert available_bytes() == 5 * 1024
    machine = host_bytes()
    statistics = {"memory.stat": "active_file 0\ninactive_file 1024"}
    for limit, left, whole in (
        ("max", 5 * 1024, machine),
        ("6144", 3072, 6144),
        ("2000", 0, 2000),
        ("90000", 5 * 1024, 90000),
        ("9223372036854771712", 5 * 1024, machine),
    ):
        write(groups / below, {limit_name: limit, use_name: 4096} | statistics)
        assert (available_bytes(), host_bytes()) == (left, whole)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 2), ("500 100000", 1), ("9900000 100000", 8)],
)
def test_the_quota_of_a_control_group_counts(limit, cores, groups):
    """A container of Docker with --cpus, or of Kubernetes with a limit, sees all cores of its machine."""
    assert usable_cores() == 8
    write(groups, {"cpu.max": limit})
    assert usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (250_000, 3)])
@pytest.mark.parametrize("below", ["cpu", "cpu/slurm"])
def test_so_does_that_of_the_first_version_of_control_groups(quota, cores, below, groups):
    write(groups / below, {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100_000})
    assert usable_cores() == cores


@pytest.mark.parametrize(("cores", "asked", "threads"), [(8, None, None), (3, None, "3"), (3, "5", "5")])
def test_torch_has_no_more_threads_than_cores(cores, asked, threads, groups, monkeypatch):
    """A variable that is set stays, and without a quota torch chooses."""
    write(groups, {"cpu.max": f"{cores}00 100"})
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": asked} if asked else {})
    set_thread_variables()
    assert os.environ.get("OMP_NUM_THREADS") == threads
