"""Hardware profiles and their errors."""

import pytest
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.training.planner.hardware import PROFILES, load_hardware, parse_hardware, profile_names

FIELDS = yaml.safe_load((PROFILES / "h100.yaml").read_text("utf-8"))


def test_every_profile_is_whole_and_names_its_sources():
    assert profile_names() == ["a100-40g", "a100-80g", "h100", "h100-500w", "h200"]
    for name in profile_names():
        profile = load_hardware(name)
        assert profile.name == name
        assert {"memory_gib", "matmul_tflops", "matmul_efficiency", "node_link", "network"} <= set(profile.sources)


def test_nvlink_counts_one_direction():
    assert load_hardware("h100").node_link.gb_per_second == 450  # 900 in both


def test_an_unknown_field_is_named_with_the_nearest():
    wrong = FIELDS | {"device": FIELDS["device"] | {"matmul_tflop": 1.0}}
    with pytest.raises(RecipeError, match=r"x.yaml: unknown field device.matmul_tflop; did you mean matmul_tflops\?"):
        parse_hardware(wrong, "x.yaml")
    with pytest.raises(RecipeError, match=r"unknown field node_gpu; did you mean node_gpus\?"):
        parse_hardware(FIELDS | {"node_gpu": 8}, "x.yaml")
    with pytest.raises(RecipeError, match=r"unknown field network.gbps; "):
        parse_hardware(FIELDS | {"network": FIELDS["network"] | {"gbps": 8}}, "x.yaml")


def test_wrong_values_are_named():
    with pytest.raises(RecipeError, match=r"device.memory_gib: Input should be greater than 0 \(got -1\)"):
        parse_hardware(FIELDS | {"device": FIELDS["device"] | {"memory_gib": -1}}, "x.yaml")
    with pytest.raises(RecipeError, match="h10: no such profile or file; did you mean h100"):
        load_hardware("h10")


def test_files_that_hold_no_profile(tmp_path):
    for text in ("- a\n- b\n", "a: [", ""):
        path = tmp_path / "machine.yaml"
        path.write_text(text)
        with pytest.raises(RecipeError, match=r"machine.yaml"):
            load_hardware(path)
    with pytest.raises(RecipeError, match="no such profile or file"):
        load_hardware(tmp_path / "absent.yaml")


def test_clusters_must_be_connected():
    two = [{"name": "a", "nodes": 2}, {"name": "b", "nodes": 2}]
    with pytest.raises(RecipeError, match="between_clusters is not given"):
        parse_hardware(FIELDS | {"clusters": two}, "x.yaml")
    numbered = [{"name": "a", "nodes": 2, "node_numbers": [0, 2]}, {"name": "b", "nodes": 2, "node_numbers": [1, 2]}]
    slow = {"kind": "ethernet", "gb_per_second": 1.25}
    with pytest.raises(RecipeError, match="each node 0 to N - 1 once"):
        parse_hardware(FIELDS | {"clusters": numbered, "between_clusters": slow}, "x.yaml")
