import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.generate import generate
from gristmill.evaluation.harness import run_tasks
from gristmill.evaluation.held_out import Question
from gristmill.evaluation.held_out_tasks import cloze_task
from gristmill.evaluation.language_model import LanguageModel
from gristmill.evaluation.load import load_subject

QUESTIONS = [
    Question(str(i), "notes", f"The mill number {i} grinds\nthe grain", ("of the day.", "of night.", "so."), i % 3)
    for i in range(7)
]


def test_two_processes_answer_as_one(tmp_path, random_checkpoint, tokenizer_folder):
    """Two copies, two tensor ranks (an odd vocabulary, so uneven shares) and two pipeline stages."""
    checkpoints = [random_checkpoint(family, name=family) for family in ("llama", "bloom")]
    worker = Path(__file__).with_name("parallel_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    command += [str(tokenizer_folder), str(tmp_path / "heard.json"), *map(str, checkpoints)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for checkpoint, heard in zip(checkpoints, json.loads((tmp_path / "heard.json").read_text()), strict=True):
        assert_as_one(heard, checkpoint, tokenizer_folder)


def assert_as_one(heard, checkpoint, tokenizer_folder):
    subject = load_subject(checkpoint, tokenizer_folder, EvaluateConfig())
    model = LanguageModel(subject.backbone, subject.codec, 500, Reporter.silent())
    alone = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig()).samples["cloze"]
    generated = generate(subject.backbone, subject.codec, [[256, 1, 2, 3], [256, 9]], 12)
    for axis in ("data", "tensor", "pipeline"):
        assert len(heard[axis]) == len(alone) == 7
        for mine, sample in zip(heard[axis], alone, strict=True):
            for left, right in zip(mine, sample["filtered_resps"], strict=True):
                assert left[0] == pytest.approx(right[0], abs=1e-4)
                assert bool(left[1]) == bool(right[1])
    for axis in ("tensor", "pipeline"):
        assert heard[f"{axis} generation"] == [list(each.tokens) for each in generated]
