"""Our results equal those of lm-eval's HFLM on the exported weights."""

import pytest

from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.models.huggingface import write_huggingface
from gristmill.evaluation.models.load import load_for_evaluation
from gristmill.evaluation.scoring.language_model import LanguageModel
from gristmill.evaluation.tasks.corpus_task_configs import bits_per_byte_task
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.evaluation.workdir import CheckpointPaths
from gristmill.foundation.progress import Reporter

pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate; pip install 'gristmill[bench]'")
huggingface = pytest.importorskip("lm_eval.models.huggingface")

CHOICES = [
    "arc_easy",
    "arc_challenge",
    "openbookqa",
    "copa",
    "piqa",
    "boolq",
    "gristmill_hellaswag",
    "winogrande",
    "gristmill_winograd_wsc",
    "wic",
    "lambada_openai",
]


@pytest.fixture
def both(tmp_path, random_checkpoint, tokenizer_folder):
    """(ours, theirs): one random model of 8 heads and 700 tokens of context."""
    checkpoint = random_checkpoint("llama", sequence_length=700)
    subject = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    write_huggingface(tmp_path / "exported", subject.causal_lm.model, 256, tokenizer_folder)
    theirs = huggingface.HFLM(pretrained=str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=8)
    return LanguageModel(subject.causal_lm, subject.codec, 4096, Reporter.silent()), theirs


def assert_same_examples(ours, theirs):
    assert ours.samples.keys() == theirs.samples.keys()
    for task in ours.samples:
        for mine, other in zip(ours.samples[task], theirs.samples[task], strict=True):
            assert mine["doc_hash"] == other["doc_hash"] and mine["prompt_hash"] == other["prompt_hash"]
            for metric in mine["metrics"]:
                assert mine[metric] == pytest.approx(other[metric], rel=1e-6, abs=1e-4)
            for (left,), (right,) in zip(mine["resps"], other["resps"], strict=True):
                assert_same_answer(left, right)


def assert_same_answer(left, right):
    if isinstance(left, str):
        assert left == right
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-6, abs=1e-4)
    else:
        assert left[0] == pytest.approx(right[0], rel=1e-6, abs=1e-4)
        assert bool(left[1]) == bool(right[1])


def test_every_choice_task_gives_the_same_examples(both, shared_data):
    data = shared_data("benchmarks/arc_easy.jsonl.zst").parents[1]
    config = EvaluateConfig(limit=6)
    ours, theirs = (run_tasks(model, CHOICES, config, TaskSources(data)) for model in both)
    assert_same_examples(ours, theirs)


def test_few_shot_prompts_are_the_same(both, shared_data):
    data = shared_data("benchmarks/copa.jsonl.zst").parents[1]
    config = EvaluateConfig(limit=6, shots=2)
    names = ["copa", "winogrande"]
    ours, theirs = (run_tasks(model, names, config, TaskSources(data)) for model in both)
    assert ours.summary["n-shot"] == {"copa": 2, "winogrande": 2}
    assert_same_examples(ours, theirs)


def test_generated_answers_are_the_same(both, shared_data):
    data = shared_data("benchmarks/gsm8k_test.jsonl.zst").parents[1]
    config = EvaluateConfig(limit=4, shots=1)
    ours, theirs = (run_tasks(model, ["gsm8k"], config, TaskSources(data)) for model in both)
    assert_same_examples(ours, theirs)


def test_minimal_pairs_and_whole_texts_are_the_same(both, shared_data):
    data = shared_data("benchmarks/blimp").parents[1]
    text = HeldOutDocument("0", "notes", "The mill turns all day, and at night it stands. " * 60)
    config = EvaluateConfig(limit=2)
    tasks = [bits_per_byte_task("notes", [text]), "blimp"]
    ours, theirs = (run_tasks(model, tasks, config, TaskSources(data)) for model in both)
    assert_same_examples(ours, theirs)
