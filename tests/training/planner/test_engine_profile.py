"""The framework descriptions."""

from gristmill.training.planner.engine_profile import FRAMEWORKS


def test_every_framework_has_a_description():
    ours = {"gristmill", "gristmill-eager"}
    megatron = {"megatron-2021", "megatron-2022", "megatron-core", "megatron-core-overlap"}
    assert set(FRAMEWORKS) == ours | megatron | {"torch-fsdp", "torchtitan", "torchtitan-eager", "llm.c"}
    assert all(program.name == name for name, program in FRAMEWORKS.items())
