"""N-gram language model over hashed tokens: how likely a text's tokens are, in KenLM's role.

The score is the mean log2-probability of a token: higher is better, and the perplexity is 2 ** -score. Tokens are those
of signals/hashed_ngrams.py. Interpolated absolute discounting (Ney, Essen, Kneser 1994) on raw counts; n-grams of two
and more tokens that occur once are left out, their mass goes to the shorter ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.hashed_ngrams import LogTable, mean_log_probabilities, ngram_keys
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json

FORMAT = "gristmill-ngram-lm"
FORMAT_VERSION = 1  # of the file, the tokens and the hashes
DISCOUNT = 0.75
MIN_TOKENS = 1_000
VOCABULARY = 2**20  # words that an unknown one is as likely as
SCORE_DIGITS = 6


@dataclass(frozen=True)
class NgramModel:
    """table: log2-probabilities and back-off weights of the n-grams. unknown: log2-probability of an unknown token."""

    table: LogTable
    order: int
    unknown: float
    report: dict[str, Any] = field(default_factory=dict)

    def scores(self, texts: TextBuffer) -> np.ndarray:
        """float64[N], rounded to 6 digits; NaN for a text without tokens."""
        return np.round(mean_log_probabilities(texts, self.table, self.order, self.unknown), SCORE_DIGITS)

    def save(self, path: Path) -> None:
        """A safetensors file whose header describes the model."""
        described = {
            "version": FORMAT_VERSION,
            "order": self.order,
            "unknown": self.unknown,
            "report": self.report,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(self.table._asdict(), {FORMAT: canonical_json(described).decode()}))


def load_ngram_model(path: Path) -> NgramModel:
    """Raises InputError for a file that is damaged or no n-gram model."""
    try:
        with safe_open(path, framework="numpy") as file:
            described = orjson.loads((file.metadata() or {})[FORMAT])
            table = LogTable(*(file.get_tensor(name) for name in LogTable._fields))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path}: the n-gram model cannot be read ({error}); fit or copy it again") from error
    size, order = len(table.keys), described.get("order")
    kinds = [(part.dtype, part.shape) for part in table]
    is_sound = kinds == [(np.uint64, (size,)), (np.float32, (size,)), (np.float32, (size,))]
    is_sound = is_sound and described.get("version") == FORMAT_VERSION and order in (1, 2, 3)
    if not is_sound or size & (size - 1) or (table.keys == 0).sum() < 1 or not np.isfinite(table.log_p).all():
        raise InputError(f"{path}: its header and tables do not describe an n-gram model; fit it again")
    return NgramModel(table, order, float(described["unknown"]), described["report"])


def fit_ngram_model(texts: Sequence[str], order: int) -> NgramModel:
    """Does not depend on the order of the texts. Raises InputError for too little text."""
    keys = ngram_keys(TextBuffer.of(sorted(texts)), order)
    total = len(keys[0])
    if total < MIN_TOKENS:
        raise InputError(f"{total} tokens in {len(texts)} documents; an n-gram model needs {MIN_TOKENS}")
    known, counts = np.unique(keys[0].whole, return_counts=True)
    left_over = DISCOUNT * len(known) / total
    unknown = left_over / VOCABULARY
    probabilities = (counts - DISCOUNT) / total + unknown
    levels = [(known, probabilities)]
    backoffs: list[tuple[np.ndarray, np.ndarray]] = []
    for level in keys[1:]:
        known, shorter, context, counts = level.counted()
        contexts, place, in_context = level.context_counts(context, counts)
        kept = counts > 1
        mass = np.where(kept, counts - DISCOUNT, 0.0)
        backoff = 1.0 - np.bincount(place, mass, len(contexts)) / in_context
        lower_keys, lower = levels[-1]
        spot = np.minimum(np.searchsorted(lower_keys, shorter), len(lower_keys) - 1)
        below = np.where(lower_keys[spot] == shorter, lower[spot], np.nan)
        kept &= ~np.isnan(below)
        levels.append((known[kept], (mass / in_context[place] + backoff[place] * below)[kept]))
        backoffs.append((contexts, backoff))
    table = _table(levels, backoffs)
    report = {"documents": len(texts), "tokens": total, "ngrams": [len(known) for known, _ in levels]}
    return NgramModel(table, order, float(np.log2(unknown)), report)


def _table(levels: Sequence[tuple], backoffs: Sequence[tuple]) -> LogTable:
    """The n-grams of all orders; a context without an entry of its own has no weight in use."""
    keys = np.concatenate([known for known, _ in levels])
    log_p = np.log2(np.concatenate([chances for _, chances in levels])).astype(np.float32)
    weights = np.zeros(len(keys), np.float32)
    order = np.argsort(keys)
    for contexts, backoff in backoffs:
        spots = order[np.minimum(np.searchsorted(keys, contexts, sorter=order), len(keys) - 1)]
        is_known = keys[spots] == contexts
        weights[spots[is_known]] = np.log2(np.maximum(backoff[is_known], 1e-12))
    return LogTable.of(keys, log_p, weights)
