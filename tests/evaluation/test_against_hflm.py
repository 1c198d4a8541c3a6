"""Our results equal those of lm-eval's HFLM on the exported weights."""

import pytest
from lm_eval.api.instance import Instance

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.import_export import export_checkpoint, import_checkpoint
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument, bits_per_byte_task
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.progress import Reporter
from tests.support.bos_models import KINDS, write_model

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
    """(ours, theirs): one random model of 8 heads; no question is longer than its context, which ours would skip."""
    checkpoint = random_checkpoint("llama", sequence_length=4000)
    subject = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    write_huggingface(tmp_path / "exported", subject.causal_lm.model, 256, tokenizer_folder)
    theirs = huggingface.HFLM(pretrained=str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=8)
    return LmEvalAdapter(subject.causal_lm, subject.tokenizer, 4096, Reporter.silent()), theirs


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
    config = EvaluateConfig(limit=6, num_fewshot=2)
    names = ["copa", "winogrande"]
    ours, theirs = (run_tasks(model, names, config, TaskSources(data)) for model in both)
    assert ours.summary["n-shot"] == {"copa": 2, "winogrande": 2}
    assert_same_examples(ours, theirs)


def test_generated_answers_are_the_same(both, shared_data):
    data = shared_data("benchmarks/gsm8k_test.jsonl.zst").parents[1]
    config = EvaluateConfig(limit=4, num_fewshot=1)
    ours, theirs = (run_tasks(model, ["gsm8k"], config, TaskSources(data)) for model in both)
    assert_same_examples(ours, theirs)


def test_minimal_pairs_and_whole_texts_are_the_same(both, shared_data):
    data = shared_data("benchmarks/blimp").parents[1]
    text = HeldOutDocument("0", "notes", "The mill turns all day, and at night it stands. " * 60)
    config = EvaluateConfig(limit=1)
    tasks = [bits_per_byte_task("notes", [text]), "blimp"]
    ours, theirs = (run_tasks(model, tasks, config, TaskSources(data)) for model in both)
    assert_same_examples(ours, theirs)


PAIRS = [("The mill turns", " all day."), ("The mill ", "stands"), ("", "At night"), ("", "<"), ("Q: one\nA:", " two")]
ROLLED = ["The mill turns all day, and at night it stands. " * 9, "x", "é and ß"]
UNTIL = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}


def instances(kind, arguments):
    return [Instance(kind, {}, args, index, ("t", index, 1)) for index, args in enumerate(arguments)]


def answers(model):
    """Answers to every request type."""
    prompts = [(text, dict(UNTIL)) for text, _ in PAIRS if text] + [("a longer prompt about the mill", dict(UNTIL))]
    return (
        model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True),
        model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in ROLLED]), True),
        model.generate_until(instances("generate_until", prompts), disable_tqdm=True),
    )


def assert_same_answers(ours, theirs):
    for left, right in zip(ours, theirs, strict=True):
        assert len(left) == len(right)
        for mine, other in zip(left, right, strict=True):
            assert_same_answer(mine, other)


@pytest.mark.parametrize("family", ["llama", "mpt", "gemma", "cohere"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_type_equals_hflm_of_its_folder(kind, family, tmp_path):
    """Families of gristmill's own model (llama, gemma) and of transformers' code (mpt, cohere)."""
    folder = write_model(tmp_path / "model", kind, family)
    subject = load_for_evaluation(CheckpointPaths(folder), EvaluateConfig())
    ours = LmEvalAdapter(subject.causal_lm, subject.tokenizer, 4096, Reporter.silent())
    limit = min(ours.max_length, 100)
    subject.causal_lm.sequence_length = limit
    theirs = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=limit)
    assert_same_answers(answers(ours), answers(theirs))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bos_without_template"])
def test_an_imported_and_an_exported_model_equal_hflm(kind, tmp_path):
    folder = write_model(tmp_path / "model", kind, eos_token_id=[257, 65])
    theirs = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=100)
    expected = answers(theirs)
    imported = import_checkpoint(folder, tmp_path / "imported")
    export_checkpoint(imported, tmp_path / "exported")
    for place in (imported, tmp_path / "exported"):
        subject = load_for_evaluation(CheckpointPaths(place), EvaluateConfig())
        subject.causal_lm.sequence_length = 100
        assert subject.tokenizer.ends == (257, 65)
        ours = LmEvalAdapter(subject.causal_lm, subject.tokenizer, 4096, Reporter.silent())
        assert_same_answers(answers(ours), expected)
    again = huggingface.HFLM(pretrained=str(tmp_path / "exported"), device="cpu", batch_size=1, max_length=100)
    assert_same_answers(answers(again), expected)
    assert again.model.generation_config.eos_token_id == [257, 65]
