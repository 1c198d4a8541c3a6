"""Gradient-boosted trees as flat arrays: prediction in a compiled loop, packing of a fitted LightGBM model."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gristmill.foundation.cached_njit import cached_njit


class Trees(NamedTuple):
    """Binary trees over float32 features. roots: int32[T], the root of each; children: int32[N, 2], the node where the
    feature is at most the threshold, and where it is above; a leaf is ~k, its value leaves[k] in log-odds."""

    roots: np.ndarray
    features: np.ndarray
    thresholds: np.ndarray
    children: np.ndarray
    leaves: np.ndarray


@cached_njit(nogil=True)
def predict(roots, features, thresholds, children, leaves, row):
    """The probability of the row's block."""
    total = 0.0
    for root in roots:
        node = np.int64(root)
        while node >= 0:
            node = np.int64(children[node, 1 if row[features[node]] > thresholds[node] else 0])
        total += leaves[~node]
    return 1 / (1 + math.exp(-total))


def predict_rows(trees: Trees, rows: np.ndarray) -> np.ndarray:
    """float32[N]: the probabilities of rows float32[N, F]."""
    result = np.empty(len(rows), np.float32)
    _predict_rows(*trees, rows, result)
    return result


@cached_njit(nogil=True)
def _predict_rows(roots, features, thresholds, children, leaves, rows, result):
    for k in range(len(rows)):
        result[k] = predict(roots, features, thresholds, children, leaves, rows[k])


def pack(model: Mapping[str, Any]) -> Trees:
    """Flatten LightGBM's `Booster.dump_model()`. All splits must be `<=` on numbers.

    Features are float32, so rounding a threshold down to float32 changes no decision."""
    roots: list[int] = []
    features: list[int] = []
    thresholds: list[float] = []
    children: list[list[int]] = []
    leaves: list[float] = []

    def add(node: Mapping[str, Any]) -> int:
        if "leaf_value" in node:
            leaves.append(node["leaf_value"])
            return ~(len(leaves) - 1)
        assert node["decision_type"] == "<="
        place = len(features)
        features.append(node["split_feature"])
        thresholds.append(_float32_below(node["threshold"]))
        children.append([0, 0])
        children[place] = [add(node["left_child"]), add(node["right_child"])]
        return place

    roots = [add(tree["tree_structure"]) for tree in model["tree_info"]]
    return Trees(
        np.array(roots, np.int32),
        np.array(features, np.int32),
        np.array(thresholds, np.float32),
        np.array(children, np.int32).reshape(-1, 2),
        np.array(leaves, np.float32),
    )


def _float32_below(value: float) -> float:
    """The largest float32 that is not above the value."""
    rounded = np.float32(value)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(-np.inf)))
