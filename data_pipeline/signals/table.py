"""Signals of many texts at once, as columns."""

from collections.abc import Sequence

import pyarrow as pa

from gristmill.data_pipeline.signals.names import SIGNAL_FIELDS
from gristmill.data_pipeline.signals.reference import WordRule, signals


def measure(texts: Sequence[str], word_rule: WordRule) -> pa.RecordBatch:
    """One row a text, one column a signal."""
    rows = [signals(text, word_rule) for text in texts]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in SIGNAL_FIELDS]
    return pa.record_batch(columns, schema=pa.schema(SIGNAL_FIELDS))
