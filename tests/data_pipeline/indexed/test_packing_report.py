"""Cuts and padding worked by hand, and held to the windows themselves."""

import numpy as np

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.packing_report import packing_report, rows
from gristmill.data_pipeline.indexed.samples import open_samples


def test_worked_by_hand(make_dataset):
    # With their ends: 3, 2, 4 tokens. Concat, windows of 3 inputs: |a a 1|b 1 c|c c 1|: the third document is cut.
    folder = make_dataset({"books": (1.0, [[10, 11], [20], [30, 31, 32]])})
    concat, best_fit = packing_report(folder, "train", 3)
    assert (concat.documents, concat.cut, concat.windows, concat.padding) == (3, 1, 2, 0)
    # Best fit, windows of 4: the third, the first, the second: 4 | 3 + . | 2 + . .
    assert (best_fit.cut, best_fit.windows, best_fit.padding) == (0, 3, 3)
    assert best_fit.padding_share == 3 / 12
    assert [row[1] for row in rows([concat, best_fit])] == ["packing", "concat", "best_fit"]


def test_padding_is_what_the_samples_leave_out(make_dataset, random_documents):
    folder = make_dataset({"books": (1.0, random_documents(0, 300, 40))})
    best_fit = packing_report(folder, "train", 16)[1]
    samples = open_samples(folder, "train", 16, 0, IndexConfig(packing="best_fit"))
    learned = sum(np.count_nonzero(samples.sample(k)["weights"]) for k in range(samples.samples_of("books")))
    assert best_fit.windows == samples.samples_of("books")
    assert learned == best_fit.windows * 16 - best_fit.padding
