"""Files of a benchmark by globs."""

from pathlib import Path

import pytest

from gristmill.data_pipeline.decontamination.config import BenchmarkConfig, benchmark_digests
from gristmill.foundation.errors import InputError


def test_globs_are_read_in_the_order_of_names_and_each_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name} asks what turns the wheel of the mill\n")
    config = BenchmarkConfig(name="quiz", paths=(tmp_path / "**" / "*.txt", tmp_path / "a.txt"))
    assert [path.name for path in config.files()] == ["a.txt", "b.txt", "c.txt"]
    assert len(benchmark_digests(config)) == 3
    with pytest.raises(InputError, match=r"\*\.none: the benchmark quiz has no file of this pattern"):
        BenchmarkConfig(name="quiz", paths=(tmp_path / "*.none",)).files()
    assert BenchmarkConfig(name="quiz", paths=(Path("absent"),)).files() == [Path("absent")]
