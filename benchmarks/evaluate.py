"""Evaluated requests per second, compared with lm-eval's HFLM (transformers) on the same weights and requests.

Both are handed lm-eval's requests, so tokenizing is in the time and building the tasks is not. HFLM has the best of
several batch sizes. The answers must agree before anything is printed."""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.samplers import ContextSampler, FirstNSampler
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from measure import Figure, arguments, in_turn, print_figures

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.inference.config import CPU_BATCH_TOKENS
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.corpus_tasks import ClozeQuestion, HeldOutDocument, bits_per_byte_task, cloze_task
from gristmill.evaluation.tasks.harness import set_num_fewshot
from gristmill.evaluation.tasks.task_index import TASK_FOLDER
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
VOCABULARY = 4096
MODEL = ModelConfig(layers=6, width=256, heads=8, kv_heads=4, sequence_length=1024)  # 6.8 M parameters
BATCH_SIZES = (1, 8, 32, 128)
DOCUMENTS = {False: 120, True: 16}  # of each task, by --quick
CHOICE_TASKS = ("arc_easy", "piqa", "gristmill_hellaswag", "openbookqa")


@dataclass(frozen=True)
class Work:
    """One figure: requests of one kind and the method of the model that runs them."""

    figure: str
    kind: str
    requests: list[Instance]
    goal: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", help="figures to measure (default: all)")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    data = options.data or Path(
        os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
    )
    works = local_works(data, options.quick) if (data / "benchmarks").is_dir() else made_works(options.quick)
    with tempfile.TemporaryDirectory() as name:
        ours = our_model(Path(name), [str(text) for work in works for text in texts(work.requests)])
        chosen = [work for work in works if options.only is None or work.figure in options.only]
        figures = [measured(work, ours, Path(name), options.quick) for work in chosen]
    print_figures(figures)


def local_works(data: Path, quick: bool) -> list[Work]:
    """Requests of the local tasks; `whole_texts` are their questions. few_shot: examples drawn for each question;
    few_shot_fixed: the same ones before all, as MMLU has them."""
    manager = TaskManager(include_path=str(TASK_FOLDER), include_defaults=False, metadata={"data": str(data)})
    count = DOCUMENTS[quick]
    choices = requests(manager, CHOICE_TASKS, count)
    few_shot = requests(manager, ["copa", "openbookqa"], count, num_fewshot=4)
    fixed = requests(manager, ["copa", "openbookqa"], count // 4, num_fewshot=4, sampler=FirstNSampler)
    questions = [str(request.args[0]) for request in choices]
    starts = range(0, len(questions), 40)
    whole = [HeldOutDocument(str(i), "questions", "\n".join(questions[i : i + 40])) for i in starts]
    generated = requests(manager, ["gsm8k"], 2 if quick else 16, num_fewshot=1)
    for request in generated:
        request.args[1]["max_gen_toks"] = 32 if quick else 96
    return [
        Work("multiple_choice", "loglikelihood", choices, 3.0),
        Work("few_shot", "loglikelihood", few_shot, 5.0),
        Work("few_shot_fixed", "loglikelihood", fixed, 5.0),
        Work(
            "whole_texts",
            "loglikelihood_rolling",
            requests(manager, [bits_per_byte_task("questions", whole)], None),
            1.0,
        ),
        Work("generation", "generate_until", generated, 1.0),
    ]


def made_works(quick: bool) -> list[Work]:
    """Synthetic requests of random words with the lengths of real questions, for machines without benchmark files."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("aeioulmnrst"), rng.integers(2, 9))) for _ in range(800)]

    def say(count: int) -> str:
        return " ".join(rng.choice(words, count))

    questions = [
        ClozeQuestion(str(i), "made", say(int(rng.integers(20, 80))), tuple(say(12) for _ in range(4)), 0)
        for i in range(4 * DOCUMENTS[quick])
    ]
    manager = TaskManager(include_defaults=False)
    whole = [HeldOutDocument(str(i), "made", say(1500)) for i in range(DOCUMENTS[quick] // 8)]
    return [
        Work("multiple_choice", "loglikelihood", requests(manager, [cloze_task(questions)], None), 3.0),
        Work("whole_texts", "loglikelihood_rolling", requests(manager, [bits_per_byte_task("made", whole)], None), 1.0),
    ]


def requests(
    manager: TaskManager,
    tasks: Sequence[Any],
    limit: int | None,
    num_fewshot: int = 0,
    sampler: type[ContextSampler] | None = None,
) -> list[Instance]:
    found: list[Instance] = []
    for task in manager.load(list(tasks))["tasks"].values():
        task.set_config("num_fewshot", num_fewshot)
        set_num_fewshot(task, num_fewshot)
        if sampler is not None:
            task.sampler = sampler(list(task.sampler.df))
        task.build_all_requests(limit=limit)
        found += task.instances
    return found


def texts(instances: Sequence[Instance]) -> list[str]:
    return [part for instance in instances for part in instance.args if isinstance(part, str)]


def our_model(folder: Path, corpus: Sequence[str]) -> LmEvalAdapter:
    """A random model and a tokenizer trained on the requests; both are exported to `folder` for HFLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sorted(set(corpus)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "clean_up_tokenization_spaces": false}'
    )
    exported = load_tokenizer(folder)
    model = Transformer(MODEL, exported.vocab_size)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    write_huggingface(folder, model, exported.end_of_document)
    return LmEvalAdapter(LocalCausalLM(model, MODEL.sequence_length), exported, CPU_BATCH_TOKENS, Reporter.silent())


def measured(work: Work, ours: LmEvalAdapter, folder: Path, quick: bool) -> Figure:
    def asked(model: Any) -> Callable[[], list[Any]]:
        return lambda: getattr(model, work.kind)(work.requests, disable_tqdm=True)

    size, peer = best_peer(work, folder)
    agree(work, asked(ours)(), asked(peer)())
    ours_seconds, peer_seconds, ratio = in_turn(asked(ours), asked(peer), rounds=1 if quick else 3)
    count = len(work.requests)
    name = f"lm-eval 0.4.13 HFLM, batch size {size}"
    return Figure(
        work.figure, count / ours_seconds, "requests/s", count / peer_seconds, name, ratio=ratio, goal=work.goal
    )


def best_peer(work: Work, folder: Path) -> tuple[int, HFLM]:
    """HFLM with its fastest batch size on a part of the requests."""
    part = work.requests[: max(4, len(work.requests) // 4)]
    found = []
    for size in BATCH_SIZES:
        model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=size)
        answer = partial(getattr(model, work.kind), part, disable_tqdm=True)
        seconds, _, _ = in_turn(answer, lambda: None, rounds=1)
        found.append((seconds, size, model))
    _, size, model = min(found, key=lambda each: each[:2])
    return size, model


def agree(work: Work, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Compares the results. Raises AssertionError if a log-likelihood differs by more than rounding, or a text at
    all."""
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, str):
            assert mine == other, (work.figure, mine, other)
        else:
            left, right = (each[0] if isinstance(each, tuple) else each for each in (mine, other))
            assert abs(left - right) <= 1e-4 + 1e-5 * abs(right), (work.figure, left, right)


if __name__ == "__main__":
    main()
