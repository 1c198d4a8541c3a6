"""Every file-system call of a stage fails once: one message, an exit code, and the same command goes on to the same
bytes."""

import pytest

from tests.simulation.failing_calls import STAGES, FailingStages, compile_library, tried

SAMPLED, MANY = 1, 40


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = compile_library(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no gcc, which compiles the library that makes calls fail")
    return library


def check(folder, library, stage: str, count: int) -> None:
    stages = FailingStages(folder, library, stage)
    try:
        failures = list(tried(stages, stage, count, seed=1))
    finally:
        stages.close()
    assert len(failures) == count and all(failure.errno for failure, _ in failures)
    assert [(failure, problems) for failure, problems in failures if problems] == []


def test_a_few_failed_calls_of_curation(tmp_path, library):
    check(tmp_path, library, "curate", SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_failed_calls_of_every_stage(tmp_path, library, stage):
    check(tmp_path, library, stage, MANY)
