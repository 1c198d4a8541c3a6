"""A stage's code version is raised when a change of its sources changes its output; otherwise old output is reused."""

import pytest
import stage_sources

CURRENT = stage_sources.current()


@pytest.mark.parametrize("stage", CURRENT)
def test_the_sources_of_a_stage_are_the_recorded_ones(stage):
    assert CURRENT[stage] == stage_sources.recorded().get(stage), (
        f"the sources of stage {stage} changed: if its output changes, raise its code_version (annotate: "
        f"ANNOTATE_VERSION); then record the digest with `{stage_sources.COMMAND}`"
    )


def test_no_stage_is_recorded_that_does_not_exist():
    assert stage_sources.recorded().keys() == CURRENT.keys()
