"""Gradient-boosted trees as flat arrays: prediction in a compiled loop, packing of a fitted LightGBM model."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gristmill.foundation.cached_njit import cached_njit

# Trees that are walked side by side: a walk waits for memory at every step, and eight walks wait together.
GROUP = 8


class Trees(NamedTuple):
    """Binary trees over float32 features, GROUP of them together: the last group is filled up with leaves of value 0.

    roots: uint32[T]. depths: int32[T / GROUP], steps to the deepest leaf of the group. Of each node: its feature and
    threshold, the node where the feature is at most the threshold (where it is above, the next one), and its value in
    log-odds. A leaf is followed by itself: its threshold is infinite. Indices are unsigned, for which numba compiles no
    check of negative ones."""

    roots: np.ndarray
    depths: np.ndarray
    features: np.ndarray
    thresholds: np.ndarray
    children: np.ndarray
    values: np.ndarray


@cached_njit(nogil=True)
def predict(trees, row):
    """The probability of the row's block. trees: Trees."""
    features, thresholds, children, values = trees.features, trees.thresholds, trees.children, trees.values
    total = 0.0
    for group in range(len(trees.depths)):
        at = group * GROUP
        a, b, c, d = trees.roots[at], trees.roots[at + 1], trees.roots[at + 2], trees.roots[at + 3]
        e, f, g, h = trees.roots[at + 4], trees.roots[at + 5], trees.roots[at + 6], trees.roots[at + 7]
        for _ in range(trees.depths[group]):
            a = children[a] + np.uint32(row[features[a]] > thresholds[a])
            b = children[b] + np.uint32(row[features[b]] > thresholds[b])
            c = children[c] + np.uint32(row[features[c]] > thresholds[c])
            d = children[d] + np.uint32(row[features[d]] > thresholds[d])
            e = children[e] + np.uint32(row[features[e]] > thresholds[e])
            f = children[f] + np.uint32(row[features[f]] > thresholds[f])
            g = children[g] + np.uint32(row[features[g]] > thresholds[g])
            h = children[h] + np.uint32(row[features[h]] > thresholds[h])
        total += values[a] + values[b] + values[c] + values[d] + values[e] + values[f] + values[g] + values[h]
    return 1 / (1 + math.exp(-total))


def predict_rows(trees: Trees, rows: np.ndarray) -> np.ndarray:
    """float32[N]: the probabilities of rows float32[N, F]."""
    result = np.empty(len(rows), np.float32)
    _predict_rows(trees, rows, result)
    return result


@cached_njit(nogil=True)
def _predict_rows(trees, rows, result):
    for k in range(len(rows)):
        result[k] = predict(trees, rows[k])


def pack(model: Mapping[str, Any]) -> Trees:
    """Flatten LightGBM's `Booster.dump_model()`. All splits must be `<=` on numbers.

    Features are float32, so rounding a threshold down to float32 changes no decision."""
    return flatten(tree["tree_structure"] for tree in model["tree_info"])


def flatten(structures: Iterable[Mapping[str, Any]]) -> Trees:
    """structures: nodes as LightGBM dumps them."""
    nodes: list[tuple[int, float, int, float]] = []
    roots, depths = [], []
    for structure in structures:
        roots.append(len(nodes))
        depths.append(_flatten_tree(structure, nodes))
    while len(roots) % GROUP:
        roots.append(len(nodes))
        depths.append(_flatten_tree({"leaf_value": 0.0}, nodes))
    features, thresholds, children, values = zip(*nodes, strict=True)
    return Trees(
        np.array(roots, np.uint32),
        np.array(depths, np.int32).reshape(-1, GROUP).max(axis=1),
        np.array(features, np.uint32),
        np.array(thresholds, np.float32),
        np.array(children, np.uint32),
        np.array(values, np.float32),
    )


def _flatten_tree(structure: Mapping[str, Any], nodes: list[tuple[int, float, int, float]]) -> int:
    """Append the tree's nodes, siblings side by side; returns the steps to its deepest leaf."""
    depth, waiting = 0, [(structure, len(nodes), 0)]
    nodes.append((0, math.inf, 0, 0.0))
    for node, place, level in waiting:
        depth = max(depth, level)
        if "leaf_value" in node:
            nodes[place] = (0, math.inf, place, node["leaf_value"])
            continue
        if node["decision_type"] != "<=":
            raise ValueError(f"a split by {node['decision_type']!r}; only numeric splits can be packed")
        nodes[place] = (node["split_feature"], _float32_below(node["threshold"]), len(nodes), 0.0)
        for side in ("left_child", "right_child"):
            waiting.append((node[side], len(nodes), level + 1))
            nodes.append((0, math.inf, 0, 0.0))
    return depth


def _float32_below(value: float) -> float:
    """The largest float32 that is not above the value."""
    rounded = np.float32(value)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(-np.inf)))
