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
from gristmill.data_pipeline.signals.intrinsics import FLOAT_LANES, borrowed, find_leaves
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Gradient-boosted trees as flat arrays: prediction in a compiled loop, packing of a fitted LightGBM model.

GROUP = 8  # trees whose values are summed in float32, before the sums are added in float64
MAX_LEAVES = 32  # of a tree: one bit each


class Trees(NamedTuple):
    """Binary trees over float32 features, a multiple of GROUP of them; filled up with leaves of value 0.

    columns: uint32[C], the features that are used. starts: int64[T + 1], the first inner node of each tree; parents
    stand before their children. Of each inner node: its feature as a place in columns, its threshold, and one bit for
    each leaf of its tree, from left to right: 0 for those that are out if the feature is above the threshold. values:
    float32, log-odds of the leaves from left to right. leaves: bool, whether each node is a leaf, level by level."""

    columns: np.ndarray
    starts: np.ndarray
    features: np.ndarray
    thresholds: np.ndarray
    masks: np.ndarray
    values: np.ndarray
    leaves: np.ndarray


@cached_njit(nogil=True)
def sum_trees(trees, panel, first, last, sums, totals):
    """Fill totals (float64[FLOAT_LANES]) with the log-odds of the rows of a panel by the trees from first to last.
    first: a multiple of GROUP. sums: float32[FLOAT_LANES], work space.

    Each node is compared for all rows together and takes leaves out of the rows' sets; the leftmost that stays is the
    row's leaf. Source: Lucchese et al., QuickScorer, SIGIR 2015."""
    values = trees.values
    reached = np.empty(FLOAT_LANES, np.int32)
    totals[:] = 0
    for tree in range(first, last):
        start = trees.starts[tree]
        find_leaves(panel, (trees.features, trees.thresholds, trees.masks), start, trees.starts[tree + 1], reached)
        if tree % GROUP == 0:
            sums[:] = 0
        for lane in range(FLOAT_LANES):
            sums[lane] += values[start + tree + reached[lane]]
        if tree % GROUP == GROUP - 1:
            for lane in range(FLOAT_LANES):
                totals[lane] += sums[lane]


@cached_njit(nogil=True)
def fill_panel(trees, rows, chosen, first, last, panel):
    """Fill panel (float32[C, FLOAT_LANES]) with the used features of the rows that chosen names from first to last."""
    columns = trees.columns
    for n in range(first, last):
        lane, row = n - first, chosen[n]
        for column in range(len(columns)):
            panel[column, lane] = rows[row, columns[column]]


@cached_njit(nogil=True, forceinline=True)
def probability(log_odds):
    return 1 / (1 + math.exp(-log_odds))


@cached_njit(nogil=True, forceinline=True)
def borrowed_trees(trees):
    """The trees for a kernel that calls others often; its caller keeps them alive."""
    return Trees(
        borrowed(trees.columns), borrowed(trees.starts), borrowed(trees.features), borrowed(trees.thresholds),
        borrowed(trees.masks), borrowed(trees.values), borrowed(trees.leaves),
    )  # fmt: skip


def predict_rows(trees: Trees, rows: np.ndarray) -> np.ndarray:
    """float32[N]: the probabilities of rows float32[N, F]."""
    result = np.empty(len(rows), np.float32)
    _predict_rows(trees, rows, result)
    return result


@cached_njit(nogil=True)
def _predict_rows(trees, rows, result):
    panel, every = np.zeros((len(trees.columns), FLOAT_LANES), np.float32), np.arange(len(rows))
    sums, totals = np.empty(FLOAT_LANES, np.float32), np.empty(FLOAT_LANES, np.float64)
    for first in range(0, len(rows), FLOAT_LANES):
        last = min(first + FLOAT_LANES, len(rows))
        fill_panel(trees, rows, every, first, last, panel)
        sum_trees(trees, panel, 0, len(trees.starts) - 1, sums, totals)
        for n in range(first, last):
            result[n] = probability(totals[n - first])


def pack(model: Mapping[str, Any]) -> Trees:
    """Flatten LightGBM's `Booster.dump_model()`. All splits must be `<=` on numbers.

    Features are float32, so rounding a threshold down to float32 changes no decision."""
    return flatten(tree["tree_structure"] for tree in model["tree_info"])


def flatten(structures: Iterable[Mapping[str, Any]]) -> Trees:
    """structures: nodes as LightGBM dumps them."""
    nodes: list[tuple[int, float, bool, float]] = []
    sizes: list[int] = []
    for structure in structures:
        sizes.append(_flatten_tree(structure, nodes))
    while len(sizes) % GROUP:
        sizes.append(_flatten_tree({"leaf_value": 0.0}, nodes))
    features, thresholds, leaves, values = (np.array(column) for column in zip(*nodes, strict=True))
    return expand(
        np.array(sizes), np.packbits(leaves), features[~leaves], thresholds[~leaves].astype(np.float32), values[leaves]
    )


def _flatten_tree(structure: Mapping[str, Any], nodes: list[tuple[int, float, bool, float]]) -> int:
    """Append the tree's nodes (feature, threshold, is a leaf, value), level by level; returns their number."""
    waiting = [structure]
    for node in waiting:
        if "leaf_value" in node:
            nodes.append((0, math.inf, True, node["leaf_value"]))
            continue
        if node["decision_type"] != "<=":
            raise ValueError(f"a split by {node['decision_type']!r}; only numeric splits can be packed")
        nodes.append((node["split_feature"], _float32_below(node["threshold"]), False, 0.0))
        waiting += [node["left_child"], node["right_child"]]
    return len(waiting)


def _float32_below(value: float) -> float:
    """The largest float32 that is not above the value."""
    rounded = np.float32(value)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(-np.inf)))


BUNDLED_PATH = Path(__file__).parent / "blocks_weights.npz"
STAGES = ("kinds", "first", "second")  # of trees
NORMALIZATION = ("means", "scales")  # arrays of the network that are stored as they are
KIND_STEPS = 16  # of the weights of tokens for page kinds, which are stored in a byte
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
    the others feature and threshold, of leaves the value, level by level."""
    sizes, features = 2 * np.diff(trees.starts) + 1, trees.columns[trees.features]
    return {
        "sizes": sizes.astype(np.uint16),
        "leaves": np.packbits(trees.leaves),
        "features": features.astype(np.uint8 if features.max(initial=0) < 256 else np.uint16),
        "thresholds": trees.thresholds,
        "values": trees.values[_leaf_order(sizes, trees.leaves)[0]].astype(np.float16),
    }


def expand(
    sizes: np.ndarray, leaves: np.ndarray, features: np.ndarray, thresholds: np.ndarray, values: np.ndarray
) -> Trees:
    """The trees of `compact`. Raises ValueError if the arrays do not fit each other."""
    sizes = sizes.astype(np.int64)
    is_leaf = np.unpackbits(leaves, count=int(sizes.sum())).astype(np.bool_)
    num_inner = np.bincount(np.repeat(np.arange(len(sizes)), sizes), ~is_leaf, len(sizes))
    starts = np.concatenate([[0], np.cumsum(num_inner)]).astype(np.int64)
    lengths = (len(features), len(thresholds), len(values) - len(sizes))
    if not len(sizes) or len(sizes) % GROUP or np.any(sizes != 2 * num_inner + 1) or set(lengths) != {int(starts[-1])}:
        raise ValueError("trees whose arrays do not fit each other")
    if sizes.max() >= 2 * MAX_LEAVES:
        raise ValueError(f"a tree of {(sizes.max() + 1) // 2} leaves; at most {MAX_LEAVES} can be packed")
    order, masks = _leaf_order(sizes, is_leaf)
    columns, places = np.unique(features, return_inverse=True)
    ordered = np.empty(len(values), np.float32)
    ordered[order] = values
    return Trees(
        columns.astype(np.uint32), starts, places.astype(np.uint32), thresholds.astype(np.float32), masks, ordered,
        is_leaf,
    )  # fmt: skip


def _leaf_order(sizes: np.ndarray, leaves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the place of each leaf if those of each tree stand from left to right, masks of Trees). sizes: nodes of each
    tree; leaves: of each node. Raises ValueError if nodes are not level by level."""
    order: list[int] = []
    masks: list[int] = []
    end = 0
    for size in sizes.tolist():
        is_leaf, first_leaf = leaves[end : end + size].tolist(), len(order)
        end += size
        inner = [node for node in range(size) if not is_leaf[node]]
        if any(2 * k + 1 <= node for k, node in enumerate(inner)):
            raise ValueError("trees whose nodes are not in order")
        counts, firsts = [1] * size, [0] * size
        for k in range(len(inner) - 1, -1, -1):
            counts[inner[k]] = counts[2 * k + 1] + counts[2 * k + 2]
        for k, node in enumerate(inner):
            firsts[2 * k + 1] = firsts[node]
            firsts[2 * k + 2] = firsts[node] + counts[2 * k + 1]
            masks.append(0xFFFFFFFF ^ (((1 << counts[2 * k + 1]) - 1) << firsts[node]))
        order += [first_leaf + firsts[node] for node in range(size) if is_leaf[node]]
    return np.array(order, np.int64), np.array(masks, np.uint32)


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
        return _loaded(path, 0 if weights == BUNDLED_WEIGHTS else path.stat().st_mtime_ns)
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
    """Whether every feature is in range and every number finite."""
    numbers = np.concatenate([trees.values, trees.thresholds])
    return bool(np.all(trees.columns < num_features) and np.all(np.isfinite(numbers)))
