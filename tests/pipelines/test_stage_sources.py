"""A stage's code version is raised when a change of its sources changes its output; otherwise old output is reused."""

from functools import cache

import pytest
import stage_sources

RECORDED = stage_sources.recorded()
current = cache(stage_sources.current)  # 2 s, which are not spent while the tests are collected


@pytest.mark.parametrize("stage", RECORDED)
def test_the_sources_of_a_stage_are_the_recorded_ones(stage):
    assert RECORDED[stage] == current().get(stage), (
        f"the sources of stage {stage} changed: if its output changes, raise its code_version (annotate: "
        f"ANNOTATE_VERSION); then record the digest with `{stage_sources.COMMAND}`"
    )


def test_every_stage_is_recorded():
    assert RECORDED.keys() == current().keys()
