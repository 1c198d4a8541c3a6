"""Data, tensor and pipeline parallel evaluation gives the results of one process."""

import pytest
import torch

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import BatchSize, generate
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.sharded import load_sharded
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion, cloze_task
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.foundation.progress import Reporter
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.parallel.mesh import ALONE, build_mesh

QUESTIONS = [
    ClozeQuestion(str(i), "notes", f"The mill number {i} grinds\nthe grain", ("of the day.", "of night.", "so."), i % 3)
    for i in range(7)
]
PROMPTS = [[256, 1, 2, 3], [256, 9], [256, 1, 2, 3, 4, 5, 6], [256], [256, 9]]
SLOTS = BatchSize(2 * (7 + 12))  # two slots, so that prompts wait until others have ended
LAYOUTS = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "both": {"tensor": 2, "pipeline": 2}}


def asked(model: LmEvalAdapter) -> list | None:
    results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
    return None if results is None else [sample["filtered_resps"] for sample in results.samples["cloze"]]


def asked_of_copies(checkpoint, tokenizer_folder):
    subject = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    mesh = build_mesh(LayoutConfig(data=2), 2, torch.device("cpu"))
    return asked(LmEvalAdapter(subject.causal_lm, subject.tokenizer, 500, Reporter.silent(), data=mesh.data))


def asked_of_parts(checkpoint, tokenizer_folder, layout):
    tokenizer = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig()).tokenizer
    causal_lm = load_sharded(
        checkpoint, layout, build_mesh(layout, 2, torch.device("cpu"), experts=layout.expert > 1), torch.float32
    )
    answers = asked(LmEvalAdapter(causal_lm, tokenizer, 500, Reporter.silent(), data=ALONE))
    return answers, [
        list(each.tokens) for each in generate(causal_lm, tokenizer, PROMPTS, GenerationSettings(12), SLOTS)
    ]


def asked_alone(checkpoint, tokenizer_folder):
    subject = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    answers = asked(LmEvalAdapter(subject.causal_lm, subject.tokenizer, 500, Reporter.silent()))
    return answers, [
        list(each.tokens)
        for each in generate(subject.causal_lm, subject.tokenizer, PROMPTS, GenerationSettings(12), SLOTS)
    ]


def assert_same(answers, expected):
    assert len(answers) == len(expected) == len(QUESTIONS)
    for mine, others in zip(answers, expected, strict=True):
        for (logprob, greedy), (other_logprob, other_greedy) in zip(mine, others, strict=True):
            assert logprob == pytest.approx(other_logprob, abs=1e-4)
            assert bool(greedy) == bool(other_greedy)


@pytest.mark.parametrize("axis", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_parts_of_a_model_answer_as_the_whole(axis, family, random_checkpoint, tokenizer_folder, pool):
    """The vocabulary of 257 is odd, so tensor ranks have uneven shares."""
    checkpoint = random_checkpoint(family)
    layout = LayoutConfig(**LAYOUTS[axis], sequence_parallel=False)
    results = pool.run(layout.world_size, asked_of_parts, checkpoint, tokenizer_folder, layout)
    expected, generated = asked_alone(checkpoint, tokenizer_folder)
    for answers, tokens in results:
        assert_same(answers, expected)
        assert tokens == generated


@pytest.mark.parametrize(
    "axes", [{"tensor": 2, "expert": 2}, {"data": 2, "expert": 2}, {"tensor": 2, "pipeline": 2, "expert": 2}], ids=str
)
def test_experts_on_ranks_answer_as_the_whole(axes, random_checkpoint, tokenizer_folder, pool):
    """Token by token too, where a tensor rank may have no token of its own."""
    checkpoint = random_checkpoint("experts")
    layout = LayoutConfig(**axes, sequence_parallel=False)
    expected, generated = asked_alone(checkpoint, tokenizer_folder)
    for answers, tokens in pool.run(layout.world_size, asked_of_parts, checkpoint, tokenizer_folder, layout):
        assert_same(answers, expected)
        assert tokens == generated


def test_two_copies_share_the_questions(random_checkpoint, tokenizer_folder, pool):
    checkpoint = random_checkpoint()
    first, second = pool.run(2, asked_of_copies, checkpoint, tokenizer_folder)
    assert second is None
    assert_same(first, asked_alone(checkpoint, tokenizer_folder)[0])
