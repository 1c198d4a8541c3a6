"""Weights files of the extractor `blocks`: token weights, two stages of trees, and where they come from."""

import hashlib
import io
import json
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import TOKEN_BITS
from gristmill.data_pipeline.extraction.blocks_config import BUNDLED_WEIGHTS
from gristmill.data_pipeline.extraction.first_stage import FIRST_FEATURES
from gristmill.data_pipeline.extraction.second_stage import SECOND_FEATURES
from gristmill.data_pipeline.extraction.trees import GROUP, Trees
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic

BUNDLED_PATH = Path(__file__).parent / "blocks_weights.npz"
STAGES = ("first", "second")
MAX_TREE_DEPTH = 1000


class Weights(NamedTuple):
    token_weights: np.ndarray  # float32[2 ** TOKEN_BITS]
    first: Trees
    second: Trees
    provenance: dict[str, Any]


def features_digest() -> str:
    """Digest of the features' names in their order: weights of other features are refused."""
    return hashlib.sha256("\n".join((*FIRST_FEATURES, "", *SECOND_FEATURES)).encode()).hexdigest()[:16]


def save_weights(path: Path, weights: Weights) -> None:
    """Equal weights give equal bytes. Token weights are stored in half precision."""
    arrays: dict[str, Any] = {"token_weights": weights.token_weights.astype(np.float16)}
    for stage, trees in zip(STAGES, weights[1:3], strict=True):
        arrays |= {f"{stage}_{name}": array for name, array in trees._asdict().items()}
    described = {"features": features_digest(), "provenance": weights.provenance}
    arrays["description"] = np.frombuffer(json.dumps(described, sort_keys=True).encode(), np.uint8)
    held = io.BytesIO()
    np.savez_compressed(held, allow_pickle=False, **arrays)
    write_atomic(path, held.getvalue())


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
    try:
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(file["description"].tobytes())
            stages = [Trees(*(file[f"{stage}_{name}"] for name in Trees._fields)) for stage in STAGES]
            weights = Weights(file["token_weights"].astype(np.float32), stages[0], stages[1], described["provenance"])
            features = described["features"]
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise InputError(f"{path}: not a weights file ({error}); `gristmill extractor fit` writes one") from error
    if features != features_digest() or len(weights.token_weights) != 1 << TOKEN_BITS:
        raise InputError(f"{path}: fitted for other features; fit it again with `gristmill extractor fit`")
    for stage, trees, names in zip(STAGES, stages, (FIRST_FEATURES, SECOND_FEATURES), strict=True):
        if not _is_sound(trees, len(names)):
            raise InputError(f"{path}: damaged trees of the {stage} stage; fit it again with `gristmill extractor fit`")
    return weights


def _is_sound(trees: Trees, num_features: int) -> bool:
    """Whether every index is in range. Prediction ends in any case: it takes as many steps as depths says."""
    nodes, places = len(trees.features), np.arange(len(trees.features))
    if {len(column) for column in trees[2:]} != {nodes} or any(column.ndim != 1 for column in trees):
        return False
    is_leaf = (trees.children == places) & np.isinf(trees.thresholds)
    return bool(
        len(trees.roots) == GROUP * len(trees.depths) > 0
        and np.all(trees.roots < nodes)
        and np.all((trees.depths >= 0) & (trees.depths < MAX_TREE_DEPTH))
        and np.all(is_leaf | ((trees.children > places) & (trees.children < nodes - 1)))
        and np.all(trees.features < num_features)
        and all(column.dtype == np.uint32 for column in (trees.roots, trees.features, trees.children))
    )
