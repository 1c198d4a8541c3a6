"""A model while it trains, asked as a checkpoint would be: nothing is saved, and the run goes on as if nothing was."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gristmill.evaluation.config import EvaluateConfig
from gristmill.evaluation.models.causal_lm import CausalLM
from gristmill.evaluation.models.load import check_tokenizer
from gristmill.evaluation.models.local_causal_lm import LocalCausalLM
from gristmill.evaluation.models.sharded_causal_lm import ShardedCausalLM
from gristmill.evaluation.results.table import ScoreRow, score_rows
from gristmill.evaluation.run import add_all_sources_group, build_held_out_tasks
from gristmill.evaluation.scoring.language_model import LanguageModel
from gristmill.evaluation.tasks.harness import require_tasks, run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.evaluation.workdir import HeldOutCorpus
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.layout_config import LayoutConfig
from gristmill.training.model.initialization import fill
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import Mesh, single_process

SINGLE_LAYOUT = LayoutConfig()

LiveScores = dict[str, dict[str, float]]  # task -> metric, and metric_stderr where it is known -> value


def check_live(
    tokenizer_folder: Path,
    vocab_size: int,
    end_of_document: int,
    tasks: Sequence[str],
    data: Path | None = None,
    padded: bool = False,
) -> None:
    """Finds before a run begins what would end it at its first evaluation. Raises InputError if the tokenizer is not
    the model's or a task's file is absent, RecipeError on a task that nobody knows (it names the nearest)."""
    codec = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer_folder, codec, vocab_size, end_of_document, padded)
    require_tasks(tasks, data)


def evaluate_live(
    model: Mapping[int, Transformer] | Transformer,
    tokenizer_folder: Path,
    tasks: Sequence[str],
    limit: int | None = None,
    *,
    layout: LayoutConfig = SINGLE_LAYOUT,
    mesh: Mesh | None = None,
    data: Path | None = None,
    corpus: HeldOutCorpus | None = None,
    shots: int | None = None,
    batch_tokens: int | None = None,
    budget_seconds: float | None = None,
    reporter: Reporter | None = None,
) -> LiveScores:
    """{"piqa": {"acc": 0.61, "acc_stderr": 0.02, ...}, ...}, the same on every process; all must call it.

    model: the live parts of this process by stage (`LocalModel.stages`), sharded or not, or a whole model; layout and
    mesh: those it trains on. Its own weights are read in the precision it computes in; gradients, optimizer, random
    numbers and sharding stay as they are. On a mesh each process gathers its tensor and pipeline share once (so much
    memory is needed beside the run, without activations), and the data ranks share the documents. data: the folder of
    the tasks' files. corpus: for bits_per_byte and cloze.

    limit: documents of a task at most. budget_seconds: tasks not yet begun when it is spent are left out, and said to
    the reporter: a single task is never cut, so a limit is what bounds it."""
    mesh = mesh or single_process()
    reporter = reporter if reporter is not None and mesh.is_first else Reporter.silent()
    parts = {0: model} if isinstance(model, Transformer) else model
    codec = load_tokenizer(tokenizer_folder)
    config = EvaluateConfig(tasks=tuple(tasks), limit=limit, shots=shots, batch_tokens=batch_tokens, samples=0)
    causal_lm = live_causal_lm(parts, layout, mesh)
    scores: LiveScores = {}
    begun = time.monotonic()
    for index, task in enumerate(config.tasks):
        if index and _spent(begun, budget_seconds, mesh):
            reporter.say(f"evaluation: its {budget_seconds:g} s are spent; left out: {', '.join(config.tasks[index:])}")
            break
        asked = LanguageModel(causal_lm, codec, config.pass_tokens(mesh.device.type), Reporter.silent(), data=mesh.data)
        rows = _rows(asked, config, task, data, corpus, mesh)
        for task_name, count in {row.task: row.not_evaluated for row in rows if row.not_evaluated}.items():
            reporter.say(f"evaluation: {task_name}: {count} questions do not fit the context and were not evaluated")
        for row in rows:
            found = scores.setdefault(row.task, {})
            if row.score is not None:
                found[row.metric] = row.score
            if row.error is not None:
                found[f"{row.metric}_stderr"] = row.error
    return scores


def live_causal_lm(parts: Mapping[int, Transformer], layout: LayoutConfig, mesh: Mesh) -> CausalLM:
    """The live model for evaluation only: no sharding over data, no compilation, no cut of the tokens. A single process
    shares the weights with the run; on a mesh they are copied in the precision of the computation."""
    plain = LayoutConfig(**{**layout.model_dump(), "sequence_parallel": False, "recompute": "none"})
    copies = {stage: _copy(part, plain, mesh) for stage, part in parts.items()}
    sequence_length = next(iter(copies.values())).config.sequence_length
    if mesh.distributed:
        return ShardedCausalLM(copies, layout, sequence_length, mesh)
    return LocalCausalLM(copies[0], sequence_length)


@torch.no_grad()
def _copy(live: Transformer, layout: LayoutConfig, mesh: Mesh) -> Transformer:
    values = _whole_over_data(live)
    copy = Transformer(live.config, live.vocab_size, mesh, layout, live.stage, ComputeOptions(live.dtype))
    fill(copy, lambda name, _: values[name])
    return copy


def _whole_over_data(live: Transformer) -> dict[str, Tensor]:
    """The part's parameters by name, those that FSDP shards gathered block by block and copied."""
    blocks = [(path, module) for path, module in live.named_modules() if isinstance(module, FSDPModule)]
    if not blocks:
        return {name: parameter.detach() for name, parameter in live.named_parameters()}
    values: dict[str, Tensor] = {}
    for path, block in reversed(blocks):  # the outermost is last: its own parameters are those of no block in it
        block.unshard()
        prefix = f"{path}." if path else ""
        for name, parameter in block.named_parameters(prefix=path):
            if name.startswith(prefix) and name not in values:
                values[name] = parameter.detach().to(live.dtype, copy=True)
        block.reshard()
    return values


def _rows(
    model: LanguageModel, config: EvaluateConfig, task: str, data: Path | None, corpus: HeldOutCorpus | None, mesh: Mesh
) -> list[ScoreRow]:
    """The rows of one task or suite, on every process."""
    alone = EvaluateConfig(**{**config.model_dump(), "tasks": (task,)})
    held_out = build_held_out_tasks(alone, model.codec, corpus)
    results = run_tasks(model, held_out.tasks or [task], alone, TaskSources(data))
    rows = []
    if results is not None:
        add_all_sources_group(results, held_out.unigram)
        rows = score_rows(results.summary, results.samples, held_out.unigram)
    return _from_who_has_them(rows, mesh)


def _from_who_has_them(rows: list[ScoreRow], mesh: Mesh) -> list[ScoreRow]:
    """lm-eval gives its results on the first copy of the model only."""
    if not mesh.distributed:
        return rows
    found: list[list[ScoreRow]] = [[] for _ in range(mesh.world.size)]
    dist.all_gather_object(found, rows)
    return next((each for each in found if each), [])


def _spent(begun: float, budget_seconds: float | None, mesh: Mesh) -> bool:
    """All take the word of the first process, whose clock may differ from theirs."""
    said = [budget_seconds is not None and time.monotonic() - begun > budget_seconds]
    if mesh.distributed and budget_seconds is not None:
        dist.broadcast_object_list(said, src=0)
    return said[0]
