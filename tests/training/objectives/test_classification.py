"""Classification of JSON lines: packing by hand, a run that learns, and records that are refused by file and line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.labelled_files import packed
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.objective import NoCorpus, ObjectiveInputs, TermSpec
from tests.support.synthetic_pairs import PIECES, VOCAB
from tests.training.objectives.test_masked import CLS, PAD, SEP, model

LINES = '{"first": "a b", "second": "c", "label": "yes"}\n{"first": "c", "second": "b b b", "label": "no"}\n'


def objective(folder: Path, text: str = LINES, classes: int = 2, **options: Any) -> Any:
    (folder / "train.jsonl").write_text(text)
    config = model(8, outputs=[{"name": "classes", "size": classes}])
    inputs = ObjectiveInputs(
        NoCorpus(VOCAB), config, VOCAB, 0, 1, pieces=PIECES, encode=lambda text: [10 + ord(c) % 32 for c in text]
    )
    settings = {"train": str(folder / "train.jsonl"), "labels": ["no", "yes"]} | options
    return make_objective("classification", settings, inputs)


def test_packing_by_hand() -> None:
    fields = packed([[5, 6], [7]], 8, CLS, SEP, PAD)
    assert fields["tokens"].tolist() == [CLS, 5, 6, SEP, 7, SEP, PAD, PAD]
    assert fields["segments"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert fields["documents"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert packed([[5, 6, 7, 8, 9], [7, 8]], 8, CLS, SEP, PAD)["tokens"].tolist() == [CLS, 5, 6, 7, SEP, 7, 8, SEP]
    assert packed([[5] * 9], 4, CLS, SEP, PAD)["tokens"].tolist() == [CLS, 5, 5, SEP]


def test_records_become_samples_and_a_term(tmp_path: Path) -> None:
    made = objective(tmp_path)
    assert sorted(int(made.sample(k)["label"]) for k in range(2)) == [0, 1]
    assert checked_loss(made).terms == (TermSpec("cross_entropy", None, 1.0),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            LINES + '{"first": "a", "second": "b", "label": "maybe"}\n',
            r"train\.jsonl:3: label 'maybe' is outside the classes \['no', 'yes'\]",
        ),
        (LINES + "not json\n", r"train\.jsonl:3: not JSON"),
        ('{"text": "a", "label": "no"}\n', r"train\.jsonl:1: no text 'first', the fields are \['label', 'text'\]"),
        (LINES + '{"first": "a", "label": "no"}\n', r"train\.jsonl:3: no text 'second'"),
        (LINES + '{"first": "a", "second": "b"}\n', r"train\.jsonl:3: no field 'label'"),
        (LINES + '["a", "b"]\n', r"train\.jsonl:3: no JSON object"),
        ('{"first": 5, "label": "no"}\n', r"train\.jsonl:1: no text 'first'"),
        ("", "holds no record"),
    ],
)
def test_bad_records_are_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        objective(tmp_path, text)


def test_labels_may_be_numbers_and_some_are_left_out(tmp_path: Path) -> None:
    text = '{"first": "a", "label": 1}\n{"first": "b", "label": 0}\n{"first": "c", "label": -1}\n'
    made = objective(tmp_path, text, labels=[0, 1], left_out=[-1], second=None)
    assert sorted(made.records) == [(["a"], 1), (["b"], 0)]
    with pytest.raises(RecipeError, match="name each label once"):
        objective(tmp_path, text, labels=[0, 0], second=None)
    with pytest.raises(InputError, match="no record is left"):
        objective(tmp_path, text.splitlines()[2], labels=[0, 1], left_out=[-1], second=None)


def test_classes_and_output_belong_together(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"2 labels need the output 'classes' of that size"):
        objective(tmp_path, classes=3)


class Halves:
    """Windows of 8 tokens of two sources in turn."""

    vocab_size, fingerprint, sources = VOCAB, "halves", ("even", "odd")

    def sample(self, k: int) -> dict[str, np.ndarray]:
        return {"tokens": np.full(8, 10 + k % 2)}

    def source_of(self, k: int) -> str:
        return self.sources[k % 2]


def test_sources_are_classes() -> None:
    config = model(8, outputs=[{"name": "classes", "size": 2}])
    inputs = ObjectiveInputs(Halves(), config, VOCAB, 0, 1, pieces=PIECES)
    made = make_objective("source_classification", {"sources": ["odd", "even"]}, inputs)
    assert made.sample(1)["tokens"].tolist() == [CLS, 11, 11, 11, 11, 11, 11, SEP]
    assert [int(made.sample(k)["source"]) for k in range(3)] == [1, 0, 1]
    assert checked_loss(made).terms == (TermSpec("cross_entropy", None, 1.0),)
    with pytest.raises(RecipeError, match=r"sources lacks \['even'\]"):
        make_objective("source_classification", {"sources": ["odd", "other"]}, inputs)
