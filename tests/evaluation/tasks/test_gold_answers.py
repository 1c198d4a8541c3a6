"""Bits per byte of right answers, of choices, of continuations and of generated text."""

import json
import math

import pytest
from lm_eval.api.instance import Instance

from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.scoring.language_model import LanguageModel
from gristmill.evaluation.tasks.corpus_task_configs import cloze_task
from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.progress import Reporter

METRIC = "answer_bits_per_byte"
QUESTIONS = [
    ClozeQuestion("0", "notes", "Grain goes in.", ("Flour comes out.", "Water comes in.", "Bread is baked.", "So."), 0),
    ClozeQuestion("1", "notes", "The mill", ("no", "turns", "stands", "sleeps"), 1),
]
GENERATES = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: {folder}/sums.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}} ="
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def model(small_causal_lm, byte_codec) -> LanguageModel:
    return LanguageModel(small_causal_lm(sequence_length=128), byte_codec, 2000, Reporter.silent())


def bits_of(model: LanguageModel, pairs: list[tuple[str, str]]) -> float:
    """pairs: context, answer with its delimiter."""
    scored = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    size = sum(len(answer.strip().encode()) for _, answer in pairs)
    return -sum(logprob for logprob, _ in scored) / math.log(2) / size


def test_of_choices(model):
    results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
    arguments = [sample["arguments"] for sample in results.samples["cloze"]]
    expected = bits_of(model, [tuple(arguments[0][0]), tuple(arguments[1][1])])
    found = results.summary["results"]["cloze"]
    assert found[f"{METRIC},none"] == pytest.approx(expected)
    assert found[f"{METRIC}_stderr,none"] > 0
    assert results.summary["higher_is_better"]["cloze"][METRIC] is False


def test_of_generated_text(model, tmp_path):
    """The prompts are those that were generated from; an answer too long for the model is left out."""
    records = [{"question": "1 + 1", "answer": "two"}, {"question": "2 + 2", "answer": "four"},
               {"question": "all", "answer": "x" * 300}]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "sums.yaml").write_text(GENERATES.replace("{folder}", str(tmp_path)))
    results = run_tasks(model, [str(tmp_path / "sums.yaml")], EvaluateConfig(), TaskSources(tmp_path))
    found = results.summary["results"]["sums"]
    assert found[f"{METRIC},none"] == pytest.approx(bits_of(model, [("1 + 1 =", " two"), ("2 + 2 =", " four")]))
    assert [METRIC in sample for sample in results.samples["sums"]] == [True, True, False]
    assert found["sample_len"] == 3 and found["exact_match,none"] == 0.0
