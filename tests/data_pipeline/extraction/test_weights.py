import numpy as np
import pytest

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import extract
from gristmill.data_pipeline.extraction.weights import (
    BUNDLED_PATH,
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


def test_trees_with_indices_out_of_range_are_refused(tmp_path):
    weights = load_weights("bundled")
    for stage, change in (
        ("first", {"children": np.full_like(weights.first.children, 10_000_000)}),
        ("first", {"roots": weights.first.roots - 1}),
        ("first", {"depths": np.full_like(weights.first.depths, 1 << 30)}),
        ("second", {"features": np.full_like(weights.second.features, 10_000)}),
        ("second", {"values": weights.second.values[:-1]}),
    ):
        trees = getattr(weights, stage)._replace(**change)
        save_weights(tmp_path / "bad.npz", weights._replace(**{stage: trees}))
        with pytest.raises(InputError, match=f"damaged trees of the {stage} stage"):
            load_weights(str(tmp_path / "bad.npz"))
        (tmp_path / "bad.npz").unlink()


def test_a_tree_worked_by_hand():
    """x[1] <= 2: log-odds -1; else x[0] <= 0.5: 0, above: 1."""
    inner = {"decision_type": "<=", "split_feature": 0, "threshold": 0.5}
    inner |= {"left_child": {"leaf_value": 0.0}, "right_child": {"leaf_value": 1.0}}
    tree = {"decision_type": "<=", "split_feature": 1, "threshold": 2.0}
    trees = flatten([tree | {"left_child": {"leaf_value": -1.0}, "right_child": inner}])
    rows = np.array([[9, 2], [0.5, 2.1], [0.6, 3]], np.float32)
    assert predict_rows(trees, rows) == pytest.approx([1 / (1 + np.e), 0.5, 1 / (1 + 1 / np.e)])
    assert trees.features[:5].tolist() == [1, 0, 0, 0, 0] and trees.children[:5].tolist() == [1, 1, 3, 3, 4]
    assert trees.depths.tolist() == [2] and len(trees.roots) == 8


def test_packed_trees_are_lightgbms():
    lightgbm = pytest.importorskip("lightgbm", reason="fitting needs the extra `extractor`")
    rng = np.random.default_rng(0)
    rows = np.round(rng.normal(size=(3000, 12)), 1).astype(np.float32)  # many values equal thresholds
    labels = (rows[:, 0] + rows[:, 1] * rows[:, 2] + rng.normal(size=3000) > 0).astype(np.float32)
    settings = {"objective": "binary", "num_leaves": 31, "num_threads": 1, "verbosity": -1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, labels), 50)
    found = predict_rows(pack(booster.dump_model()), rows)
    assert np.abs(found - booster.predict(rows)).max() < 1e-6
