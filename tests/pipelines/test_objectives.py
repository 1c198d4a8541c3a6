"""Objectives from the command line: BERT from raw text to the report, and errors before the first step."""

import json
import random
import re

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
    "model.norm: layernorm",
    "model.mlp: gelu",
    "model.biases: true",
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


FINE_TUNING = """name: fine
tokenizer: {{pretrained: {pretrained}/tokenizer}}
model: {model}
train:
  tokens: 512
  batch_tokens: 128
  precision: fp32
  init_from: {pretrained}/train/checkpoints/step-00000008
  objective: {objective}
  objective_options: {{train: records.jsonl{options}}}
"""
PAIR = {"premise": "The miller grinds grain.", "hypothesis": "The miller sleeps.", "label": 1}
CHOICE = {"article": "Water turns the wheel.", "question": "What turns?", "options": ["Sack", "Wheel"], "answer": "B"}
SPAN = {
    "context": "Water turns the wheel. " * 9,
    "question": "What?",
    "answers": [{"text": "wheel", "answer_start": 16}],
}
TASKS = {
    "classification": ({"name": "classes", "size": 2}, ", labels: [0, 1], first: premise, second: hypothesis", PAIR),
    "multiple_choice": ({"name": "choice", "size": 1}, ", choices: 2", CHOICE),
    "span_extraction": ({"name": "span", "size": 2, "over": "tokens"}, ", stride: 8", SPAN),
}

CLASSES = {
    "classification": "MegatronBertForSequenceClassification",
    "multiple_choice": "MegatronBertForMultipleChoice",
    "span_extraction": "MegatronBertForQuestionAnswering",
}


def test_fine_tuning_needs_no_sources(call, write, tmp_path):
    """From a pretrained checkpoint and a file of records to scores, an export and the same bytes again."""
    write(*BERT, "evaluate.limit: 4")
    assert call("run", "small.yaml", "--to", "train")[0] == 0
    pretrained = next(tmp_path.rglob("train/metrics.jsonl")).parents[1]
    records = tmp_path / "records.jsonl"
    for objective, (output, options, record) in TASKS.items():
        records.write_text((json.dumps(record) + "\n") * 6)
        model = json.loads((pretrained / "train/model.json").read_bytes())["model"] | {"outputs": [output]}
        text = FINE_TUNING.format(pretrained=pretrained, objective=objective, model=json.dumps(model), options=options)
        (tmp_path / "fine.yaml").write_text(text)
        code, said = call("run", "fine.yaml", "--workdir", objective)
        assert code == 0, said
        assert sorted(path.name for path in (tmp_path / objective).glob("[a-z]*")) == [
            "evaluate", "lock.json", "logs", "report", "tokenizer", "train",
        ]  # fmt: skip
        table = (tmp_path / objective / "evaluate/table.md").read_text()
        assert ("exact match" if objective == "span_extraction" else "accuracy") in table and "chance" in table
        assert "Blend" not in (tmp_path / objective / "report/report.md").read_text()
        code, said = call("export", "--checkpoint", f"{objective}/train", "--output", f"{objective}-out")
        assert (code, CLASSES[objective] in said) == (0, True), said
        report = (tmp_path / objective / "report/report.md").read_text()
        assert "accuracy" in report or "exact match" in report
    (tmp_path / "made.py").write_text(MADE)
    (tmp_path / "made.yaml").write_text(
        re.sub(r"objective: .*\n  objective_options: .*", "objective: made.py:Made", text)
    )
    code, said = call("run", "made.yaml", "--workdir", "made")
    assert code == 0 and "parity: accuracy" in (tmp_path / "made/evaluate/table.md").read_text(), said
    code, said = call("reproduce", f"{objective}/train", "--workdir", "again")
    assert (code, "identical" in said) == (0, True), said
    assert call("verify", objective)[0] == 0
    records.write_text((json.dumps(SPAN) + "\n") * 7)
    code, said = call("plan", "fine.yaml", "--workdir", objective)
    assert "records.train" in said and "rebuild" in said, said
    records.write_text(json.dumps(SPAN) + "\n" + json.dumps(SPAN | {"question": None}) + "\n")
    for command in ("check", "run"):
        code, said = call(command, "fine.yaml", "--workdir", objective)
        assert (code, "records.jsonl:2: no text 'question'" in said, "Traceback" in said) == (1, True, False), said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "masked"}, "sources: missing or empty; name at least 1 item"),
        ({"objective": "own.py:Own"}, "own.py:Own draws windows from a corpus, and the recipe has no sources"),
        ({"pretrained": "x", "tokenizer": ""}, "without sources there is no text to train a tokenizer on"),
    ],
)
def test_what_needs_sources_says_so(call, tmp_path, changes, says):
    (tmp_path / "own.py").write_text(OWN)
    model = "{layers: 1, width: 8, heads: 2}"
    values = {"pretrained": "gone", "objective": "classification", "model": model, "options": ""}
    text = FINE_TUNING.format(**(values | {name: changes[name] for name in changes if name != "tokenizer"}))
    if "tokenizer" in changes:
        text = text.replace("tokenizer: {pretrained: x/tokenizer}\n", "")
    (tmp_path / "fine.yaml").write_text(text.replace("{train: records.jsonl}", "{}"))
    code, said = call("check", "fine.yaml")
    assert (code, says in said) == (2, True), said


MADE = """
import numpy as np
import torch.nn.functional as F
from gristmill.training.objectives.objective import Objective, Term

class Made(Objective):
    data = "own"

    def sample(self, k):
        tokens = np.random.default_rng([self.inputs.seed, k]).integers(0, self.inputs.vocab_size, 32)
        return {"tokens": tokens, "parity": np.array(tokens[0] % 2)}

    def classes(self, model):
        return model.output("span")[:, 0]

    def loss(self, model, batch):
        return [Term("parity", F.cross_entropy(self.classes(model), batch["parity"], reduction="none"))]

    def predict(self, model, batch):
        return {"parity": self.classes(model).argmax(dim=-1)}
"""

OWN = """
from gristmill.training.objectives.objective import Causal

class Own(Causal):
    pass
"""


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (["train.objective: msked"], 2, "'msked' is not one of"),
        (["train.objective: gone.py:Mine"], 2, "train.objective: gone.py: No such file or directory"),
        ([*BERT, "index.sentences: false"], 2, "draws pairs of sentences; set index.sentences: true"),
        ([*BERT, "tokenizer.user_symbols: []"], 2, "the tokenizer has no piece '[CLS]'; set tokenizer.user_symbols"),
        ([*BERT, "train.objective_options: {mask_rate: 2}"], 2, "train.objective_options.mask_rate"),
    ],
)
def test_what_cannot_train_is_refused_with_its_reason(call, write, changes, code, says):
    write(*changes)
    found, said = call("check", "small.yaml", "--to", "train")
    assert (found, says in said) == (code, True), said
    assert "Traceback" not in said
