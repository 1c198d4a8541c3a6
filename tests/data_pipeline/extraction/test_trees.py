import numpy as np
import pytest

from gristmill.data_pipeline.extraction.trees import flatten, pack, predict_rows


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
