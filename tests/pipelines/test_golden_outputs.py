"""Each stage writes the recorded output for a small fixed corpus; a stage whose output changes raises its version."""

import golden_outputs
import pytest

RECORDED = golden_outputs.recorded()


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    return golden_outputs.digests(golden_outputs.run(tmp_path_factory.mktemp("golden")))


@pytest.mark.parametrize("stage", RECORDED)
def test_the_output_of_a_stage_is_the_recorded_one(stage, digests):
    version = golden_outputs.code_versions()[stage]
    raised = version != RECORDED[stage]["code_version"]
    advice = "" if raised else f"raise the stage's code version ({version}), so that old output is made again; then "
    assert digests[stage] == RECORDED[stage]["digest"], (
        f"stage {stage} writes something else: {advice}record it with `{golden_outputs.COMMAND}`"
    )


def test_every_stage_is_recorded():
    assert RECORDED.keys() == golden_outputs.code_versions().keys()
