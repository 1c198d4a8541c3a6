"""What each process of test_parallel.py does; its arguments are TOKENIZER OUTPUT CHECKPOINT...

Asks the same questions of two copies, of two tensor ranks and of two pipeline stages, and writes what rank 0 heard."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.generate import generate
from gristmill.evaluation.harness import run_tasks
from gristmill.evaluation.held_out import Question
from gristmill.evaluation.held_out_tasks import cloze_task
from gristmill.evaluation.language_model import LanguageModel
from gristmill.evaluation.load import load_subject
from gristmill.evaluation.parallel_backbone import load_parallel
from gristmill.training.config import LayoutConfig
from gristmill.training.parallel.mesh import ALONE, build_mesh

QUESTIONS = [
    Question(str(i), "notes", f"The mill number {i} grinds\nthe grain", ("of the day.", "of night.", "so."), i % 3)
    for i in range(7)
]


def main(tokenizer: Path, output: Path, *checkpoints: Path) -> None:
    dist.init_process_group("gloo")
    heard = [all_layouts(checkpoint, tokenizer) for checkpoint in checkpoints]
    if dist.get_rank() == 0:
        output.write_text(json.dumps(heard))
    dist.destroy_process_group()


def all_layouts(checkpoint: Path, tokenizer: Path) -> dict:
    heard = {}
    subject = load_subject(checkpoint, tokenizer, EvaluateConfig())
    copies = build_mesh(LayoutConfig(data=2), 2, torch.device("cpu"))
    heard["data"] = ask(LanguageModel(subject.backbone, subject.codec, 500, Reporter.silent(), data=copies.data))
    for axis in ("tensor", "pipeline"):
        layout = LayoutConfig(**{axis: 2}, sequence_parallel=False)
        backbone = load_parallel(checkpoint, layout, build_mesh(layout, 2, torch.device("cpu")), torch.float32)
        heard[axis] = ask(LanguageModel(backbone, subject.codec, 500, Reporter.silent(), data=ALONE))
        prompts = [[256, 1, 2, 3], [256, 9]]
        heard[f"{axis} generation"] = [list(each.tokens) for each in generate(backbone, subject.codec, prompts, 12)]
    return heard


def ask(model: LanguageModel) -> list | None:
    results = run_tasks(model, [cloze_task(QUESTIONS)], EvaluateConfig())
    return None if results is None else [sample["filtered_resps"] for sample in results.samples["cloze"]]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
