"""Evaluate a model on tasks and write a results folder: `gristmill evaluate` and the stage `evaluate`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.evaluation.bits_per_byte_groups import add_groups
from gristmill.evaluation.config import RECALL_TASKS, EvaluateConfig
from gristmill.evaluation.models.load import LoadedModel, load_for_evaluation
from gristmill.evaluation.results.table import ScoreRow, score_rows
from gristmill.evaluation.results.transfer import transfer_markdown, transfer_table
from gristmill.evaluation.results.write import write_results
from gristmill.evaluation.scoring.language_model import LanguageModel, TextTokenizer
from gristmill.evaluation.scoring.request_cache import RequestCache
from gristmill.evaluation.tasks.contamination import contamination_rows, found_in_corpus
from gristmill.evaluation.tasks.continuations import continuations
from gristmill.evaluation.tasks.corpus_task_configs import (
    BITS_PER_BYTE,
    CLOZE,
    HELD_OUT_TASKS,
    bits_per_byte_task,
    cloze_task,
)
from gristmill.evaluation.tasks.corpus_tasks import (
    HeldOutDocument,
    bits_per_byte_texts,
    by_language,
    cloze_questions,
    read_held_out,
    require_questions,
)
from gristmill.evaluation.tasks.harness import run_tasks
from gristmill.evaluation.tasks.multilingual import family_of
from gristmill.evaluation.tasks.recall_tasks import recall_tasks
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.evaluation.tasks.unigram import count_tokens, unigram_bits
from gristmill.evaluation.workdir import CheckpointPaths, HeldOutCorpus
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.training.parallel.mesh import ALONE, Axis


@dataclass(frozen=True)
class HeldOutTasks:
    """lm-eval configs of the held-out tasks. unigram: by task, bits of each document under a unigram model of the
    training tokens."""

    tasks: list[dict[str, Any]]
    unigram: dict[str, list[float]]


@dataclass(frozen=True)
class EvaluationPaths:
    """Input and output folders of an evaluation. data: files of the named tasks. corpus: for the held-out tasks. cache:
    cached results of earlier requests. download: lm-eval's own tasks may download data. include_path: a folder of task
    files."""

    output: Path
    data: Path | None = None
    corpus: HeldOutCorpus | None = None
    cache: Path | None = None
    download: bool = False
    include_path: Path | None = None

    @property
    def tasks(self) -> TaskSources:
        return TaskSources(self.data, self.download, self.include_path)


def evaluate_folder(
    source: CheckpointPaths,
    paths: EvaluationPaths,
    config: EvaluateConfig,
    reporter: Reporter,
    device: str | torch.device = "cpu",
) -> list[ScoreRow]:
    """Loads a checkpoint (or a Hugging Face folder) and its tokenizer and evaluates it; with a corpus also writes
    generations.json."""
    loaded = load_for_evaluation(source, config, device)
    rows = evaluate(loaded, paths, config, reporter)
    if paths.corpus is not None and config.samples:
        found = continuations(loaded.causal_lm, loaded.codec, read_held_out(paths.corpus.curate), config)
        text = json.dumps([item.model_dump() for item in found], indent=2, ensure_ascii=False)
        write_atomic(paths.output / "generations.json", text.encode() + b"\n")
    return rows


def evaluate(
    loaded: LoadedModel,
    paths: EvaluationPaths,
    config: EvaluateConfig,
    reporter: Reporter,
    data: Axis = ALONE,
    writes: bool = True,
) -> list[ScoreRow]:
    """Runs every task, writes results.json, samples/, table.md and table.html; returns the rows of the table.

    data: the data-parallel replicas, each of which runs a part of the documents. Only the process that `writes` returns
    rows."""
    answers = None if paths.cache is None else paths.cache / f"answers-{loaded.digest}.sqlite"
    cache = None if answers is None else RequestCache(answers, reporter.say)
    for note in filter(None, (loaded.note, loaded.memory_note)):
        reporter.say(note)
    batch_tokens = config.pass_tokens(loaded.causal_lm.device.type)
    model = LanguageModel(loaded.causal_lm, loaded.codec, batch_tokens, reporter, cache, data=data)
    held_out = build_held_out_tasks(config, loaded.codec, paths.corpus)
    named = [name for name in config.tasks if name not in (*HELD_OUT_TASKS, *RECALL_TASKS)]
    results = run_tasks(model, [*held_out.tasks, *generated_tasks(config, model), *named], config, paths.tasks)
    if results is None or not writes:
        return []
    add_groups(results, held_out.unigram, config.group_by)
    rows = score_rows(results.summary, results.samples, held_out.unigram)
    if paths.corpus is not None:
        rows += contamination_rows(results, found_in_corpus(paths.corpus.curate))
    notes = [*table_notes(config, held_out.unigram), *results.notes, *loaded.note.split("\n")[:1]]
    write_results(paths.output, results.summary, results.samples, rows, notes)
    if transfer := transfer_table(rows, family_of):
        write_atomic(paths.output / "transfer.md", transfer_markdown(transfer).encode())
    return rows


def generated_tasks(config: EvaluateConfig, model: LanguageModel) -> list[dict[str, Any]]:
    """The recall tasks of config.tasks, at the lengths that the model reads."""

    def count_tokens(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in model.codec.encode_batch(texts)]

    return recall_tasks(config, count_tokens, model.causal_lm.sequence_length)


def build_held_out_tasks(config: EvaluateConfig, codec: TextTokenizer, corpus: HeldOutCorpus | None) -> HeldOutTasks:
    """The held-out tasks of config.tasks. Raises RecipeError if there is no corpus for them, InputError if it is too
    small."""
    wanted = [name for name in config.tasks if name in HELD_OUT_TASKS]
    if not wanted:
        return HeldOutTasks([], {})
    if corpus is None:
        raise RecipeError(f"{', '.join(wanted)} need the held-out documents: name the folder the run was made in")
    documents = read_held_out(corpus.curate)
    if not documents:
        raise InputError(
            f"{corpus.curate / 'documents' / 'test'}: no held-out document; raise the test share in curate.splits"
        )
    work = HeldOutTasks([], {})
    if BITS_PER_BYTE in wanted:
        groups = by_language(documents) if config.group_by == "language" else documents
        _add_bits_per_byte(work, groups, config, codec, count_tokens(corpus.index, codec.vocab_size))
    if CLOZE in wanted:
        questions = cloze_questions(documents, config.cloze_items, config.cloze_choices, corpus.seed)
        require_questions(questions, corpus.curate)
        work.tasks.append(cloze_task(questions))
    return work


def _add_bits_per_byte(
    work: HeldOutTasks,
    groups: Mapping[str, Sequence[HeldOutDocument]],
    config: EvaluateConfig,
    codec: TextTokenizer,
    counts: np.ndarray,
) -> None:
    """groups: held-out documents by source or language."""
    for name, found in groups.items():
        texts = bits_per_byte_texts(found, config.text_bytes)
        if texts:
            task = bits_per_byte_task(name, texts)
            work.tasks.append(task)
            work.unigram[task["task"]] = [unigram_bits(counts, text, codec) for text in texts]


def table_notes(config: EvaluateConfig, unigram: Mapping[str, Sequence[float]]) -> list[str]:
    """Notes below the table: definitions of the metrics, and settings that change the scores."""
    notes = []
    if unigram:
        notes.append(
            "chance of bits_per_byte: a unigram model of the training tokens on the same text; lower is better"
        )
        notes.append(
            "bits_per_byte counts the UTF-8 bytes of the text; each text is scored without any context before it"
        )
    if CLOZE in config.tasks:
        notes.append(
            "acc_mutual_info chooses the line with the greatest ratio of probabilities with and without the context"
        )
    if config.limit is not None:
        notes.append(f"only the first {config.limit} documents of each task were evaluated (limit)")
    if config.weights != "as_trained":
        notes.append(f"weights were quantized to {config.weights} for this evaluation")
    return notes
