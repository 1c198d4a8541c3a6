"""Weights files of the extractor `blocks`: token weights, trees, a network, and where they come from."""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import TABLE_SIZE
from gristmill.data_pipeline.extraction.block_features import FIRST_FEATURES, KIND_FEATURES
from gristmill.data_pipeline.extraction.blocks_config import BUNDLED_WEIGHTS, NUM_KINDS
from gristmill.data_pipeline.extraction.context_features import NETWORK_SHAPES, SECOND_FEATURES, Network
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Gradient-boosted trees as flat arrays: prediction in a compiled loop, packing of a fitted LightGBM model.

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
    return predict_groups(trees, row, 0, len(trees.depths))


@cached_njit(nogil=True)
def predict_groups(trees, row, first, last):
    """The probability by the groups of trees from first to last."""
    return 1 / (1 + math.exp(-sum_groups(trees, row, first, last)))


@cached_njit(nogil=True)
def sum_groups(trees, row, first, last):
    """The log-odds by the groups of trees from first to last."""
    features, thresholds, children, values = trees.features, trees.thresholds, trees.children, trees.values
    total = 0.0
    for group in range(first, last):
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
    return total


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


BUNDLED_PATH = Path(__file__).parent / "blocks_weights.npz"
STAGES = ("kinds", "first", "second")  # of trees
NORMALIZATION = ("means", "scales")  # arrays of the network that are stored as they are
KIND_STEPS = 16  # of the weights of tokens for page kinds, which are stored in a byte
MAX_TREE_DEPTH = 1000
COMPACT = ("sizes", "leaves", "features", "thresholds", "values")


class Weights(NamedTuple):
    """token_weights: float32[TABLE_SIZE]. kind_tokens: float32[TABLE_SIZE, NUM_KINDS], multiples of 1 / KIND_STEPS.
    kinds: equally many trees for each page kind."""

    token_weights: np.ndarray
    kind_tokens: np.ndarray
    kinds: Trees
    first: Trees
    second: Trees
    network: Network
    provenance: dict[str, Any]


def features_digest() -> str:
    """Digest of the features' names in their order: weights of other features are refused."""
    return hashlib.sha256("\n".join((*KIND_FEATURES, "", *FIRST_FEATURES, "", *SECOND_FEATURES)).encode()).hexdigest()[
        :16
    ]


def save_weights(path: Path, weights: Weights) -> None:
    """Equal weights give equal bytes. Token weights, leaves and the network are stored in half precision."""
    arrays: dict[str, Any] = {"token_weights": weights.token_weights.astype(np.float16)}
    arrays["kind_tokens"] = np.round(weights.kind_tokens * KIND_STEPS).astype(np.int8)
    for stage in STAGES:
        arrays |= {f"{stage}_{name}": array for name, array in compact(getattr(weights, stage)).items()}
    for name, array in weights.network._asdict().items():
        arrays[f"network_{name}"] = array if name in NORMALIZATION else array.astype(np.float16)
    described = {"features": features_digest(), "provenance": weights.provenance}
    arrays["description"] = np.frombuffer(json.dumps(described, sort_keys=True).encode(), np.uint8)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomic(path, content.getvalue())


def compact(trees: Trees) -> dict[str, np.ndarray]:
    """Arrays that `expand` makes the trees of: of each tree its number of nodes, of each node whether it is a leaf, of
    the others feature and threshold, of leaves the value. A node's children follow from the order of the nodes."""
    places = np.arange(len(trees.features))
    is_leaf = trees.children == places
    return {
        "sizes": np.diff([*trees.roots, len(places)]).astype(np.uint16),
        "leaves": np.packbits(is_leaf),
        "features": trees.features[~is_leaf].astype(np.uint8 if trees.features.max() < 256 else np.uint16),
        "thresholds": trees.thresholds[~is_leaf],
        "values": trees.values[is_leaf].astype(np.float16),
    }


def expand(
    sizes: np.ndarray, leaves: np.ndarray, features: np.ndarray, thresholds: np.ndarray, values: np.ndarray
) -> Trees:
    """The trees of `compact`. Raises ValueError if the arrays do not fit each other."""
    starts = np.concatenate([[0], np.cumsum(sizes.astype(np.int64))])
    count = int(starts[-1])
    is_leaf = np.unpackbits(leaves, count=count).astype(np.bool_)
    inner = np.cumsum(~is_leaf) - 1
    tree = np.repeat(np.arange(len(sizes)), sizes)
    first = np.concatenate([inner, [len(features)]])[starts[:-1]] + is_leaf[starts[:-1]] if count else starts[:-1]
    children = np.where(is_leaf, np.arange(count), starts[:-1][tree] + 1 + 2 * (inner - first[tree]))
    num_inner = np.bincount(tree, ~is_leaf, len(sizes))
    if len(sizes) % GROUP or not count or np.any(sizes != 2 * num_inner + 1) or len(features) != len(thresholds):
        raise ValueError("trees whose arrays do not fit each other")
    all_features, all_thresholds = np.zeros(count, np.uint32), np.full(count, np.inf, np.float32)
    all_values = np.zeros(count, np.float32)
    all_features[~is_leaf], all_thresholds[~is_leaf], all_values[is_leaf] = features, thresholds, values
    depths = np.zeros(count, np.int32)
    for node in np.flatnonzero(~is_leaf).tolist():  # parents come first
        depths[children[node] : children[node] + 2] = depths[node] + 1
    deepest = np.maximum.reduceat(depths, starts[:-1])
    return Trees(
        starts[:-1].astype(np.uint32),
        deepest.reshape(-1, GROUP).max(axis=1).astype(np.int32),
        all_features,
        all_thresholds,
        children.astype(np.uint32),
        all_values,
    )


def in_half_precision(trees: Trees) -> Trees:
    """The trees as a weights file holds them."""
    return trees._replace(values=trees.values.astype(np.float16).astype(np.float32))


def network_in_half_precision(network: Network) -> Network:
    """The network as a weights file holds it."""
    halved = {
        name: array.astype(np.float16).astype(np.float32)
        for name, array in network._asdict().items()
        if name not in NORMALIZATION
    }
    return network._replace(**halved)


def weights_path(weights: str) -> Path:
    return BUNDLED_PATH if weights == BUNDLED_WEIGHTS else Path(weights)


def load_weights(weights: str) -> Weights:
    """Raises InputError if the file is missing, damaged or of other features."""
    path = weights_path(weights)
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a file that `gristmill extractor fit` wrote") from error


def weights_digest(weights: str) -> str:
    path = weights_path(weights)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a file that `gristmill extractor fit` wrote") from error


@lru_cache(maxsize=4)
def _loaded(path: Path, modified: int) -> Weights:
    other = InputError(f"{path}: fitted for other features; fit it again with `gristmill extractor fit`")
    try:
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(file["description"].tobytes())
            if described["features"] != features_digest():
                raise other
            kinds, first, second = (expand(*(file[f"{stage}_{name}"] for name in COMPACT)) for stage in STAGES)
            network = Network(*(file[f"network_{name}"].astype(np.float32) for name in Network._fields))
            tokens = file["token_weights"].astype(np.float32)
            kind_tokens = file["kind_tokens"].astype(np.float32) / KIND_STEPS
        weights = Weights(tokens, kind_tokens, kinds, first, second, network, described["provenance"])
    except InputError:
        raise
    except Exception as error:  # zipfile, zlib, numpy and json have many kinds for damaged, encrypted and cut files
        raise InputError(f"{path}: not a weights file ({error}); `gristmill extractor fit` writes one") from error
    if weights.token_weights.shape + weights.kind_tokens.shape != (TABLE_SIZE, TABLE_SIZE, NUM_KINDS):
        raise other
    for stage, trees, names in zip(STAGES, weights[2:5], (KIND_FEATURES, FIRST_FEATURES, SECOND_FEATURES), strict=True):
        if not _is_sound(trees, len(names)):
            raise InputError(f"{path}: damaged trees of the {stage} stage; fit it again with `gristmill extractor fit`")
    if {name: array.shape for name, array in network._asdict().items()} != NETWORK_SHAPES or not all(
        np.all(np.isfinite(array)) for array in network
    ):
        raise InputError(f"{path}: a damaged network; fit it again with `gristmill extractor fit`")
    return weights


def _is_sound(trees: Trees, num_features: int) -> bool:
    """Whether every index is in range. Prediction ends in any case: it takes as many steps as depths says."""
    nodes = len(trees.features)
    return bool(
        np.all(trees.roots < nodes)
        and np.all(trees.depths < MAX_TREE_DEPTH)
        and np.all(trees.children < nodes)
        and np.all(trees.features < num_features)
        and np.all(np.isfinite(trees.values))
    )
