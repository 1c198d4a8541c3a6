"""Objectives from the command line: BERT from raw text to the report, and errors before the first step."""

import json
import random

import pytest
from bad_input import small

SYMBOLS = 'tokenizer.user_symbols: ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]'
BERT = (
    SYMBOLS,
    "tokenizer.vocab_size: 320",
    "index.sentences: true",
    "model.sequence_length: 32",
    "model.attention: bidirectional",
    "model.positions: learned",
    "model.segments: 2",
    "model.head_transform: true",
    "model.head_bias: true",
    "model.tied_embeddings: true",
    "model.outputs: [{name: sentence_order, size: 2}]",
    "train.objective: masked",
    "train.tokens: 2048",
    "train.batch_tokens: 256",
    "train.validation.every: 4",
    "evaluate.limit: 8",
    "curate.splits: {validation: 0.2, test: 0.2}",
)


@pytest.fixture
def write(tmp_path):
    """Writes small.yaml with changed fields, and 60 documents of a few sentences."""

    def write_recipe(*changes):
        generator = random.Random(0)
        raw = tmp_path / "raw"
        raw.mkdir(exist_ok=True)
        words = ["miller", "grain", "sack", "wheel", "stone", "water", "flour", "bread"]
        for number in range(60):
            sentences = [" ".join(generator.choices(words, k=6)).capitalize() + "." for _ in range(8)]
            (raw / f"{number}.txt").write_text(" ".join(sentences))
        (tmp_path / "small.yaml").write_text(small("sources.0.paths: ['raw/*.txt']", *changes))

    return write_recipe


def test_bert_goes_from_raw_text_to_the_report(call, write, tmp_path):
    write(*BERT)
    code, said = call("run", "small.yaml")
    assert code == 0, said
    lines = [json.loads(line) for line in next(tmp_path.rglob("train/metrics.jsonl")).read_text().splitlines()]
    assert lines[-1]["terms"].keys() == {"masked_tokens", "sentence_order"} == lines[-1]["validation"]["terms"].keys()
    table = next(tmp_path.rglob("evaluate/table.md")).read_text()
    for words in ("targets: accuracy", "swapped: accuracy", "swapped: F1", "masked_tokens", "sentence_order"):
        assert words in table
    assert next(tmp_path.rglob("report/*.html")).is_file()


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (["train.objective: msked"], 2, "'msked' is not one of"),
        (["train.objective: gone.py:Mine"], 2, "train.objective: gone.py: No such file or directory"),
        ([*BERT, "index.sentences: false"], 1, "not split into sentences; set index.sentences: true"),
        ([*BERT, "tokenizer.user_symbols: []"], 2, "the tokenizer has no piece '[CLS]'"),
        ([*BERT, "train.objective_options: {mask_rate: 2}"], 2, "train.objective_options.mask_rate"),
    ],
)
def test_what_cannot_train_is_refused_with_its_reason(call, write, changes, code, says):
    write(*changes)
    found, said = call("run", "small.yaml", "--to", "train")
    assert (found, says in said) == (code, True), said
    assert "Traceback" not in said
