"""Memory that a process may still take."""

from gristmill.foundation.startup import available_bytes


def test_the_limit_of_a_control_group_counts(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       8 kB\nMemAvailable:      5 kB\n")
    assert available_bytes(info, tmp_path) == 5 * 1024
    (tmp_path / "memory.current").write_text("3072\n")
    for limit, expected in (("max", 5 * 1024), ("6144", 3072), ("2000", 0), ("90000", 5 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes(info, tmp_path) == expected
