"""Signals of many texts at once, as columns."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.characters import character_table
from gristmill.data_pipeline.signals.kernel import measure_texts
from gristmill.data_pipeline.signals.names import SIGNAL_FIELDS
from gristmill.data_pipeline.signals.reference import WordRule


def measure(texts: Sequence[str], word_rule: WordRule) -> pa.RecordBatch:
    """One row per text, one column per signal."""
    return measure_buffer(TextBuffer.of(texts), word_rule)


def measure_buffer(buffer: TextBuffer, word_rule: WordRule) -> pa.RecordBatch:
    """measure, of texts that are in a buffer already."""
    counts, ratios = measure_texts(buffer.text, buffer.offsets, character_table(), word_rule == "unicode")
    columns = [*np.ascontiguousarray(counts.T), *np.ascontiguousarray(ratios.T)]
    return pa.record_batch([pa.array(column) for column in columns], schema=pa.schema(SIGNAL_FIELDS))
