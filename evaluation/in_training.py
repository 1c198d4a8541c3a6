"""Evaluate the model during training without saving a checkpoint; the run itself does not change."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.load_model import check_tokenizer
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.sharded import ShardedCausalLM
from gristmill.evaluation.inference.workdir import HeldOutCorpus
from gristmill.evaluation.results.table import ScoreRow, score_rows
from gristmill.evaluation.run import add_groups, build_held_out_tasks, generated_tasks
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.evaluation.tasks.harness import require_tasks, run_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.model.init import fill, parameter_dtype, shard_like
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.linear import Float8Weight
from gristmill.training.parallel.mesh import ALONE, Mesh, local, single_process

InTrainingScores = dict[str, dict[str, float]]  # task -> metric, and metric_stderr where it is known -> value


@dataclass(frozen=True)
class ModelInTraining:
    """The model of this process during training, sharded or not. stages: as in `LocalModel.stages`. layout, mesh: those
    it trains on."""

    stages: Mapping[int, Transformer]
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    mesh: Mesh = field(default_factory=single_process)


@dataclass(frozen=True)
class InTrainingSources:
    """tokenizer: its folder. data: files of the named tasks. corpus: for bits_per_byte and cloze."""

    tokenizer: Path
    data: Path | None = None
    corpus: HeldOutCorpus | None = None


def check_in_training(
    tokenizer_folder: Path,
    vocab_size: int,
    end_of_document: int,
    tasks: Sequence[str],
    data: Path | None = None,
    padded: bool = False,
) -> None:
    """Checks tokenizer and tasks before a run begins. Raises InputError if the tokenizer is not the model's or a task's
    file is absent, RecipeError on an unknown task (with the nearest name)."""
    tokenizer = load_tokenizer(tokenizer_folder)
    check_tokenizer(tokenizer_folder, ModelTokenizer.of(tokenizer), vocab_size, end_of_document, padded)
    require_tasks(tasks, data)


def evaluate_in_training(
    model: ModelInTraining,
    sources: InTrainingSources,
    config: EvaluateConfig,
    budget_seconds: float | None = None,
    reporter: Reporter | None = None,
) -> InTrainingScores:
    """{"piqa": {"acc": 0.61, "acc_stderr": 0.02, ...}, ...}, equal on every process; all must call it.

    Uses the weights in the dtype of the computation. Gradients, optimizer, random state and sharding do not change. On
    a mesh each process gathers its tensor and pipeline shard once (additional memory, before any activations), and the
    data ranks share the documents. budget_seconds: tasks that have not begun after this time are skipped, with a
    message; a task that has begun is finished, so set a limit too."""
    mesh = model.mesh
    reporter = reporter if reporter is not None and mesh.is_first else Reporter.silent()
    tokenizer = load_tokenizer(sources.tokenizer)
    causal_lm = causal_lm_in_training(model, tokenizer.vocab_size)
    # Ranks that exchange tokens with each other's experts must run the same passes, so they share no documents.
    copies = mesh.data if model.layout.tensor % model.layout.expert_ranks == 0 else ALONE
    scores: InTrainingScores = {}
    begun = time.monotonic()
    for index, task in enumerate(config.tasks):
        if index and _budget_is_spent(begun, budget_seconds, mesh):
            reporter.info(
                f"evaluation: its budget of {budget_seconds:g} s is spent; skipped: {', '.join(config.tasks[index:])}"
            )
            break
        batch_tokens = config.pass_tokens(mesh.device.type)
        language_model = LmEvalAdapter(causal_lm, tokenizer, batch_tokens, Reporter.silent(), data=copies)
        rows = _rows(language_model, config, task, sources, mesh)
        for task_name, count in {row.task: row.num_skipped for row in rows if row.num_skipped}.items():
            reporter.info(
                f"evaluation: {task_name}: {count} questions are longer than the sequence length and were not evaluated"
            )
        for row in rows:
            task_scores = scores.setdefault(row.task, {})
            if row.score is not None:
                task_scores[row.metric] = row.score
            if row.error is not None:
                task_scores[f"{row.metric}_stderr"] = row.error
    return scores


def causal_lm_in_training(model: ModelInTraining, vocab_size: int) -> CausalLM:
    """The model for evaluation only: without FSDP, compilation, and sequence and context parallelism. A single process
    shares the weights with the run; on a mesh they are copied in the dtype of the computation. vocab_size: of the
    tokenizer."""
    changes = {
        "sequence_parallel": False,
        "recompute": "none",
        "offloaded_token_fraction": None,
        "context": 1,
        "rank_order": None,
    }
    plain = LayoutConfig(**{**model.layout.model_dump(), **changes})
    copies = {number: _copy(stage, plain, model.mesh) for number, stage in model.stages.items()}
    if model.mesh.distributed:
        return ShardedCausalLM(copies, model.layout, vocab_size, model.mesh)
    return LocalCausalLM(copies[0], copies[0].config.sequence_length, vocab_size)


@torch.no_grad()
def _copy(live: Transformer, layout: LayoutConfig, mesh: Mesh) -> Transformer:
    values = _unsharded_over_data(live)
    copy = Transformer(live.config, live.vocab_size, mesh, layout, live.stage, ComputeOptions(live.dtype))
    fill(copy, lambda name, _: values[name])
    for name, buffer in saved_buffers(live).items():
        saved_buffers(copy)[name].copy_(buffer)
    return copy


def _unsharded_over_data(live: Transformer) -> dict[str, Tensor]:
    """The stage's parameters by name; those that FSDP shards are gathered layer by layer and copied."""
    blocks = [(path, module) for path, module in live.named_modules() if isinstance(module, FSDPModule)]
    if not blocks:
        return {name: parameter.detach() for name, parameter in live.named_parameters()}
    values: dict[str, Tensor] = {}
    for path, block in reversed(blocks):  # the outermost is last and has the parameters of none of its layers
        block.unshard()
        prefix = f"{path}." if path else ""
        gathered_in_float8: dict[str, Tensor] = {}
        for name, parameter in block.named_parameters(prefix=path):
            if not name.startswith(prefix) or name in values:
                continue
            if isinstance(local(parameter.detach()), Float8Weight):
                gathered_in_float8[name] = parameter.detach()
            else:
                values[name] = parameter.detach().to(parameter_dtype(name, live.config, live.dtype), copy=True)
        block.reshard()
        for name, parameter in gathered_in_float8.items():  # for training; here all bits count
            values[name] = shard_like(_whole(live.get_parameter(name).detach().to(live.dtype)), parameter)
    return values


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _rows(
    model: LmEvalAdapter, config: EvaluateConfig, task: str, sources: InTrainingSources, mesh: Mesh
) -> list[ScoreRow]:
    """The rows of one task or suite, on every process."""
    one_task = EvaluateConfig(**{**config.model_dump(), "tasks": (task,)})
    held_out = build_held_out_tasks(one_task, model.text_tokenizer, sources.corpus)
    made = [*held_out.tasks, *generated_tasks(one_task, model)]
    results = run_tasks(model, [*made] or [task], one_task, TaskSources(sources.data))
    rows = []
    if results is not None:
        add_groups(results, held_out.unigram, config.group_by)
        rows = score_rows(results.summary, results.samples, held_out.unigram)
    return _on_every_process(rows, mesh)


def _on_every_process(rows: list[ScoreRow], mesh: Mesh) -> list[ScoreRow]:
    """Sends the rows to all processes; lm-eval returns them on the first replica only."""
    if not mesh.distributed:
        return rows
    gathered: list[list[ScoreRow]] = [[] for _ in range(mesh.world.size)]
    dist.all_gather_object(gathered, rows)
    return next((rank_rows for rank_rows in gathered if rank_rows), [])


def _budget_is_spent(begun: float, budget_seconds: float | None, mesh: Mesh) -> bool:
    """Decided by rank 0 for all processes, since their clocks differ."""
    decision = [budget_seconds is not None and time.monotonic() - begun > budget_seconds]
    if mesh.distributed and budget_seconds is not None:
        dist.broadcast_object_list(decision, src=0)
    return decision[0]
