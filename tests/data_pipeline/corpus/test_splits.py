"""How often a document is written, by the number of its duplicates."""

import numpy as np
import pytest

from gristmill.data_pipeline.corpus.splits import read_repeats, repeats_of
from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.foundation.errors import InputError


def test_worked_example():
    sizes = np.array([1, 2, 4, 5, 9, 1000, 5000])
    assert repeats_of(sizes, {2: 2, 5: 3, 1000: 1}).tolist() == [1, 2, 2, 3, 3, 1, 1]


def test_a_corpus_without_a_ledger_and_senseless_tables_are_refused(tmp_path):
    with pytest.raises(InputError, match="no ledger, which"):
        read_repeats(tmp_path, {2: 2})
    with pytest.raises(ValueError, match="sizes are 2 or more, and times 1 to 100"):
        IndexConfig(rehydrate={1: 2})
