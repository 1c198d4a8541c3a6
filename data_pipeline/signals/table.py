"""Signals of many texts at once, as columns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.buffer import TextArrays, TextBuffer
from gristmill.data_pipeline.signals.characters import character_table
from gristmill.data_pipeline.signals.kernel import NUM_WORD_SIGNALS, measure_texts
from gristmill.data_pipeline.signals.names import SIGNAL_FIELDS
from gristmill.data_pipeline.signals.reference import WordRule


def measure(texts: Sequence[str], word_rule: WordRule) -> pa.RecordBatch:
    """One row per text, one column per signal."""
    return measure_buffer(TextBuffer.of(texts), word_rule)


def measure_buffer(buffer: TextBuffer, word_rule: WordRule) -> pa.RecordBatch:
    """measure, of texts that are in a buffer already."""
    return measure_edited(buffer, word_rule, None).signals


class Measured(NamedTuple):
    """signals: one row per text, one column per signal. word_signals: int64[N, NUM_WORD_SIGNALS], what does not change
    with the white space between words; see kernel.measure_texts."""

    signals: pa.RecordBatch
    word_signals: np.ndarray


def measure_edited(buffer: TextBuffer, word_rule: WordRule, before: tuple[np.ndarray, np.ndarray] | None) -> Measured:
    """measure_buffer of edited texts. before: the word_signals before the edit, and bool[N]: texts of which the edit
    removed white space alone, so that their words are not counted again. None: nothing is known."""
    count = len(buffer)
    unknown = (np.empty((count, NUM_WORD_SIGNALS), np.int64), np.zeros(count, np.bool_))
    word_signals, are_known = unknown if before is None else (before[0].copy(), before[1])
    texts = TextArrays(buffer.text, buffer.offsets, character_table())
    counts, ratios = measure_texts(texts, word_rule == "unicode", word_signals, are_known)
    columns = [*np.ascontiguousarray(counts.T), *np.ascontiguousarray(ratios.T)]
    signals = pa.record_batch([pa.array(column) for column in columns], schema=pa.schema(SIGNAL_FIELDS))
    return Measured(signals, word_signals)
