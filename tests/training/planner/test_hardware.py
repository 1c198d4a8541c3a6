"""Hardware profiles and their errors."""

import pytest
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.training.planner.hardware import (
    FITTED,
    PROFILES,
    Device,
    Hardware,
    Link,
    Rates,
    Sustained,
    load_hardware,
    parse_hardware,
    profile_names,
)
from gristmill.training.planner.network import (
    GroupLink,
    all_reduce_seconds,
    gather_seconds,
    gather_volume,
    group_link,
    send_seconds,
)

FIELDS = yaml.safe_load((PROFILES / "h100.yaml").read_text("utf-8"))


def test_every_profile_is_whole_and_names_its_sources():
    assert profile_names() == ["a100-40g", "a100-80g", "b200", "h100", "h100-500w", "h200"]
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
    with pytest.raises(RecipeError, match=r"x.yaml: device: Field required$"):
        parse_hardware({key: value for key, value in FIELDS.items() if key != "device"}, "x.yaml")


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


# Times of matmuls and collectives, on values that can be checked by hand.

PLAIN = Hardware(
    name="plain",
    device=Device(
        memory_gib=10,
        memory_tb_per_second=1,
        memory_efficiency=1,
        matmul_tflops=100,
        matmul_efficiency=1,
        multiprocessors=4,
        tile_penalty=0,
        depth_penalty=0,
        kernel_microseconds=0,
    ),
    node_gpus=4,
    node_link=Link(kind="nvlink", gb_per_second=100, latency_microseconds=0),
    network=Link(kind="infiniband", gb_per_second=10, latency_microseconds=0),
)


def test_a_wave_that_is_not_full_costs_a_full_one():
    """4 multiprocessors, tiles of 256 x 128: 4 tiles run as one wave; a fifth, split in four, a quarter of another."""
    rates = Rates(PLAIN, Sustained())
    assert rates.matmul(1024, 4096, 128) == pytest.approx(2 * 1024 * 4096 * 128 / 100e12)
    device = Device.model_validate(PLAIN.device.model_dump() | {"tile_penalty": 1e6})  # only the largest pays
    large = Rates(Hardware.model_validate(PLAIN.model_dump() | {"device": device.model_dump()}), Sustained())
    assert large.matmul(1024 + 64, 65536, 128) == pytest.approx(1.25 * large.matmul(1024, 65536, 128))


def test_a_thin_matmul_is_bound_by_memory():
    rates = Rates(PLAIN, Sustained())
    assert rates.matmul(8192, 1, 8192) == pytest.approx(2 * (2 * 8192 + 8192**2) / 1e12)


def test_larger_matmuls_are_more_efficient(hardware):
    rates = Rates(hardware, FITTED)
    sizes = [256, 512, 1024, 2048, 4096, 8192]
    rate = [2 * n**3 / rates.matmul(n, n, n) for n in sizes]
    assert rate == sorted(rate)
    assert rate[-1] < 312e12 * hardware.device.matmul_efficiency


def test_volumes_by_hand():
    """4 ranks, 1000 bytes: 750 through each link for a gather, 1500 for an all-reduce."""
    link = GroupLink(1000.0, 0.0)
    assert gather_volume(1000, 4) == 750
    assert gather_seconds(1000, 4, link) == 0.75
    assert all_reduce_seconds(1000, 4, link) == 1.5
    assert send_seconds(1000, link) == 1.0
    assert all_reduce_seconds(1000, 1, link) == 0.0


def test_a_group_drives_the_adapters_of_its_members():
    rates = Rates(PLAIN, Sustained())
    assert group_link(rates, 4, 1).bandwidth == 100e9  # within a node
    assert group_link(rates, 8, 1).bandwidth == 40e9  # two nodes, four members and adapters in each
    assert group_link(rates, 8, 2).bandwidth == 20e9  # two members in each
    assert group_link(rates, 8, 4).bandwidth == 10e9  # one
    assert group_link(rates, 2, 2).bandwidth == 100e9
