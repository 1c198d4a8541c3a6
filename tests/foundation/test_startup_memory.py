"""Memory that a process may still take, and its cores."""

import os

import pytest

from gristmill.foundation.startup import MEMORY_FILES, available_bytes, host_bytes, set_thread_variables, usable_cores


@pytest.mark.parametrize(("limit_file", "use_file", "statistics"), MEMORY_FILES)
def test_the_limit_of_a_control_group_counts(limit_file, use_file, statistics, tmp_path):
    """Of 4,096 bytes in use the kernel gives up 1,024 before all others."""
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       8 kB\nMemAvailable:      5 kB\n")
    assert available_bytes(info, tmp_path) == 5 * 1024
    machine = host_bytes(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / use_file).write_text("4096\n")
    (tmp_path / statistics).write_text("active_file 0\ninactive_file 1024\n")
    for limit, left, whole in (
        ("max", 5 * 1024, machine),
        ("6144", 3072, 6144),
        ("2000", 0, 2000),
        ("90000", 5 * 1024, 90000),
        ("9223372036854771712", 5 * 1024, machine),
    ):
        (tmp_path / limit_file).write_text(f"{limit}\n")
        assert (available_bytes(info, tmp_path), host_bytes(tmp_path)) == (left, whole)


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("150000 100000", 2), ("500 100000", 1), ("9900000 100000", 8)],
)
def test_the_quota_of_a_control_group_counts(limit, cores, eight_cores, tmp_path):
    """A container of Docker with --cpus, or of Kubernetes with a limit, sees all cores of its machine."""
    assert usable_cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (250_000, 3)])
def test_so_does_that_of_the_first_version_of_control_groups(quota, cores, eight_cores, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("cores", "asked", "threads"), [(8, None, None), (3, None, "3"), (3, "5", "5")])
def test_torch_has_no_more_threads_than_cores(cores, asked, threads, eight_cores, monkeypatch):
    """A variable that is set stays, and without a quota torch chooses."""
    monkeypatch.setattr("gristmill.foundation.startup.usable_cores", lambda: cores)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": asked} if asked else {})
    set_thread_variables()
    assert os.environ.get("OMP_NUM_THREADS") == threads
