import numpy as np
import pytest

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.context_features import (
    GROUPINGS,
    LAYERS,
    NETWORK_SHAPES,
    NUM_INPUTS,
    Network,
    predict_network,
    scale_inputs,
)
from gristmill.data_pipeline.extraction.html_extraction import extract
from gristmill.data_pipeline.extraction.weights import (
    BUNDLED_PATH,
    compact,
    expand,
    flatten,
    load_weights,
    pack,
    predict_rows,
    save_weights,
    weights_digest,
)
from gristmill.foundation.errors import InputError


def test_weights_are_written_and_read_as_they_are(tmp_path):
    weights = load_weights("bundled")
    save_weights(tmp_path / "again.npz", weights)
    assert (tmp_path / "again.npz").read_bytes() == BUNDLED_PATH.read_bytes()
    assert weights.provenance["pages"] > 900 and weights.provenance["lightgbm"]
    assert weights_digest(str(tmp_path / "again.npz")) == weights_digest("bundled")


@pytest.mark.parametrize("content", [b"", b"PK", b"text"])
def test_a_file_that_holds_no_weights_says_so(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"bad.npz.*gristmill extractor fit"):
        extract(b"<p>a", None, "blocks", BlocksConfig(weights=str(tmp_path / "bad.npz")))
    with pytest.raises(InputError, match=r"none.npz.*gristmill extractor fit"):
        load_weights(str(tmp_path / "none.npz"))


def test_damaged_trees_and_networks_are_refused(tmp_path):
    save_weights(tmp_path / "good.npz", load_weights("bundled"))
    with np.load(tmp_path / "good.npz") as file:
        arrays = dict(file)
    for name, change in (
        ("first_features", np.full_like(arrays["first_features"], 255)),
        ("first_leaves", ~arrays["first_leaves"]),
        ("second_sizes", arrays["second_sizes"][:-1]),
        ("second_values", arrays["second_values"][:-1]),
        ("network_mixes", arrays["network_mixes"][:1]),
        ("network_outs", arrays["network_outs"] * np.float16(np.nan)),
        ("kinds_thresholds", arrays["kinds_thresholds"][1:]),
        ("kinds_values", arrays["kinds_values"] * np.float16(np.inf)),
    ):
        np.savez_compressed(tmp_path / f"{name}.npz", **(arrays | {name: change}))
        with pytest.raises(
            InputError, match=f"{name}.npz: (not a weights file|damaged trees of the|a damaged network)"
        ):
            load_weights(str(tmp_path / f"{name}.npz"))


def test_trees_are_the_same_when_they_are_stored():
    inner = {"decision_type": "<=", "split_feature": 1, "threshold": 0.5}
    left = inner | {"left_child": {"leaf_value": 0.25}, "right_child": {"leaf_value": 1.0}}
    trees = flatten([inner | {"left_child": left, "right_child": {"leaf_value": 3.0}}, {"leaf_value": 2.0}])
    for stored, kept in zip(expand(**compact(trees)), trees, strict=True):
        assert stored.tolist() == kept.tolist() and stored.dtype == kept.dtype


def test_a_tree_worked_by_hand():
    """x[1] <= 2: log-odds -1; else x[0] <= 0.5: 0, above: 1."""
    inner = {"decision_type": "<=", "split_feature": 0, "threshold": 0.5}
    inner |= {"left_child": {"leaf_value": 0.0}, "right_child": {"leaf_value": 1.0}}
    tree = {"decision_type": "<=", "split_feature": 1, "threshold": 2.0}
    trees = flatten([tree | {"left_child": {"leaf_value": -1.0}, "right_child": inner}])
    rows = np.array([[9, 2], [0.5, 2.1], [0.6, 3]], np.float32)
    assert predict_rows(trees, rows) == pytest.approx([1 / (1 + np.e), 0.5, 1 / (1 + 1 / np.e)])
    assert trees.columns[trees.features].tolist() == [1, 0] and trees.starts.tolist() == [0, *[2] * 8]
    assert [f"{~mask & 0b111:03b}" for mask in trees.masks.tolist()] == [
        "001",
        "010",
    ]  # leaves out above, from the right
    assert trees.values.tolist() == [-1, 0, 1, *[0] * 7]


LEAVES = {"left_child": {"leaf_value": 0.0}, "right_child": {"leaf_value": 1.0}}


def test_trees_of_more_leaves_than_bits_and_nodes_out_of_order_are_refused():
    inner = {"decision_type": "<=", "split_feature": 0, "threshold": 0.0}
    tree: dict = inner | LEAVES
    for _ in range(5):  # 2, 4, ... 64 leaves
        tree = inner | {"left_child": tree, "right_child": tree}
    with pytest.raises(ValueError, match="leaves; at most 32 can be packed"):
        flatten([tree])
    arrays = compact(flatten([inner | LEAVES]))
    arrays["leaves"] = np.packbits([True, False, True] + 7 * [True])
    with pytest.raises(ValueError, match="not in order"):
        expand(**arrays)


def test_packed_trees_are_lightgbms():
    lightgbm = pytest.importorskip("lightgbm", reason="fitting needs the extra `extractor`")
    rng = np.random.default_rng(0)
    rows = np.round(rng.normal(size=(3000, 12)), 1).astype(np.float32)  # many values equal thresholds
    labels = (rows[:, 0] + rows[:, 1] * rows[:, 2] + rng.normal(size=3000) > 0).astype(np.float32)
    settings = {"objective": "binary", "num_leaves": 31, "num_threads": 1, "verbosity": -1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, labels), 50)
    found = predict_rows(pack(booster.dump_model()), rows)
    assert np.abs(found - booster.predict(rows)).max() < 1e-6


def test_inputs_are_about_logarithms():
    rows = np.zeros((2, NUM_INPUTS), np.float32)
    rows[0, :5] = [0, 1, 3, -3, 5]
    scale_inputs(rows, np.array([0.5, 0.8], np.float32))
    assert rows[0, :5].tolist() == [0, 1, 2, -2, 2.5]
    assert rows[:, -1] == pytest.approx([0, 2], abs=1e-6)  # odds of 1 and 4


def test_a_network_mixes_neighbours_and_groups():
    """The same sums in numpy, block by block."""
    rng = np.random.default_rng(5)
    network = Network(*(rng.normal(0, 0.1, shape).astype(np.float32) for shape in NETWORK_SHAPES.values()))
    inputs, weights = rng.normal(size=(5, NUM_INPUTS)).astype(np.float32), np.array([1, 2, 0.5, 1, 3], np.float32)
    groups = np.array([[0, 1, 0, 1, 2], [0, 0, 0, 0, 1], [0, 1, 2, 3, 4], [0] * 5], np.int32)
    state = np.maximum((inputs - network.means) * network.scales @ network.first + network.first_bias, 0)
    for layer in range(LAYERS):
        before, behind = np.zeros_like(state), np.zeros_like(state)
        before[1:], behind[:-1] = state[:-1], state[1:]
        parts = [state, before, behind]
        for group in groups:
            same = (group[:, None] == group) * weights
            parts.append(same @ state / same.sum(axis=1, keepdims=True))
        mixed = np.maximum(np.concatenate(parts, axis=1) @ network.mixes[layer] + network.mix_bias[layer], 0)
        state = state + mixed @ network.outs[layer] + network.out_bias[layer]
    found, counts = np.empty(5, np.float32), np.array([3, 2, 5, 1])
    assert len(groups) == GROUPINGS
    predict_network(network, inputs, weights, groups, counts, found)
    assert found == pytest.approx(state @ network.last + network.last_bias, abs=1e-5)
