"""Evaluate a model on tasks and write a results folder: `gristmill evaluate` and the stage `evaluate`.

Example continuations and scores without contaminated questions belong to the results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.data_pipeline.decontamination.decontaminate import DECONTAMINATION_FOLDER, QUESTIONS_NAME, REPORT_JSON
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import RECALL_TASKS, EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.load_model import LoadedModel, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths, HeldOutCorpus
from gristmill.evaluation.results.statistics import (
    LN2,
    bits_per_byte,
    evaluated,
    ratio_error,
    scores,
    standard_error,
    unigram_bits_per_byte,
)
from gristmill.evaluation.results.table import (
    ScoreRow,
    rows_of,
    score_rows,
    transfer_markdown,
    transfer_table,
    write_results,
)
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter, RequestCache, TextTokenizer
from gristmill.evaluation.tasks.benchmark_texts import OURS
from gristmill.evaluation.tasks.corpus_tasks import (
    BITS_PER_BYTE,
    CLOZE,
    HELD_OUT_TASKS,
    LANGUAGE_AND_SCRIPT,
    HeldOutDocument,
    answerable,
    bits_per_byte_task,
    bits_per_byte_texts,
    by_language,
    cloze_questions,
    cloze_task,
    held_out_documents,
    read_held_out,
)
from gristmill.evaluation.tasks.harness import TaskResults, run_tasks
from gristmill.evaluation.tasks.recall_tasks import recall_tasks
from gristmill.evaluation.tasks.suites import family_of
from gristmill.evaluation.tasks.task_index import TaskSources
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
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
    if paths.corpus is not None and config.num_continuations:
        texts = continuations(loaded.causal_lm, loaded.tokenizer, read_held_out(paths.corpus.curate), config)
        text = json.dumps([item.model_dump() for item in texts], indent=2, ensure_ascii=False)
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
    cache = None if answers is None else RequestCache(answers, reporter.info)
    for note in filter(None, (loaded.note, loaded.memory_note)):
        reporter.info(note)
    batch_tokens = config.pass_tokens(loaded.causal_lm.device.type)
    model = LmEvalAdapter(loaded.causal_lm, loaded.tokenizer, batch_tokens, reporter, cache, data=data)
    config, missing = answerable(config, paths.corpus)
    if missing:
        reporter.info(f"evaluate: {missing}")
    held_out = build_held_out_tasks(config, loaded.tokenizer, paths.corpus)
    named = [name for name in config.tasks if name not in (*HELD_OUT_TASKS, *RECALL_TASKS)]
    results = run_tasks(model, [*held_out.tasks, *generated_tasks(config, model), *named], config, paths.tasks)
    if results is None or not writes:
        return []
    add_groups(results, held_out.unigram, config.group_by)
    rows = score_rows(results.summary, results.samples, held_out.unigram)
    if paths.corpus is not None:
        rows += contamination_rows(results, contaminated_questions(paths.corpus.curate))
    notes = [*table_notes(config, held_out.unigram), *results.notes, *loaded.note.splitlines()[:1]]
    write_results(paths.output, results.summary, results.samples, rows, notes)
    if transfer := transfer_table(rows, family_of):
        write_atomic(paths.output / "transfer.md", transfer_markdown(transfer).encode())
    return rows


def generated_tasks(config: EvaluateConfig, model: LmEvalAdapter) -> list[dict[str, Any]]:
    """The recall tasks of config.tasks, at the lengths that the model reads."""

    def count_tokens(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in model.text_tokenizer.encode_batch(texts)]

    return recall_tasks(config, count_tokens, model.causal_lm.sequence_length)


def build_held_out_tasks(
    config: EvaluateConfig, tokenizer: TextTokenizer, corpus: HeldOutCorpus | None
) -> HeldOutTasks:
    """The held-out tasks of config.tasks, which are `answerable`. Raises as `held_out_documents` does."""
    documents = held_out_documents(config, corpus)
    work = HeldOutTasks([], {})
    if corpus is None or not documents:
        return work
    wanted = [name for name in config.tasks if name in HELD_OUT_TASKS]
    if BITS_PER_BYTE in wanted:
        groups = by_language(documents) if config.group_by == "language" else documents
        _add_bits_per_byte(work, groups, config, tokenizer, count_tokens(corpus.index, tokenizer.vocab_size))
    if CLOZE in wanted:
        questions = cloze_questions(documents, config.cloze_items, config.cloze_choices, corpus.seed)
        work.tasks.append(cloze_task(questions))
    return work


def _add_bits_per_byte(
    work: HeldOutTasks,
    groups: Mapping[str, Sequence[HeldOutDocument]],
    config: EvaluateConfig,
    tokenizer: TextTokenizer,
    counts: np.ndarray,
) -> None:
    """groups: held-out documents by source or language."""
    for name, documents in groups.items():
        texts = bits_per_byte_texts(documents, config.text_bytes)
        if texts:
            task = bits_per_byte_task(name, texts)
            work.tasks.append(task)
            work.unigram[task["task"]] = [unigram_bits(counts, text, tokenizer) for text in texts]


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
    if config.quantization != "none":
        notes.append(f"weights were quantized to {config.quantization} for this evaluation")
    return notes


# Bits per byte over several tasks: all sources or languages, and the languages of each script.


def add_groups(results: TaskResults, unigram: Mapping[str, Sequence[float]], group_by: str) -> None:
    """Adds lm-eval groups: over all sources or languages, and by language one for each script of several languages."""
    names = [name for name in results.samples if name.startswith(f"{BITS_PER_BYTE}_") and name in unigram]
    if group_by == "language":
        scripts: dict[str, list[str]] = {}
        for name in names:
            if parts := LANGUAGE_AND_SCRIPT.fullmatch(name):
                scripts.setdefault(parts["script"], []).append(name)
        for script, of_script in sorted(scripts.items(), reverse=True):
            _add_group(results, f"{BITS_PER_BYTE}_script_{script}", f"{BITS_PER_BYTE} (script {script})", of_script)
    _add_group(results, BITS_PER_BYTE, f"{BITS_PER_BYTE} (all {group_by}s)", names)


def _add_group(results: TaskResults, group: str, alias: str, names: list[str]) -> None:
    """Summed bits over summed bytes; no group of a single task."""
    if len(names) < 2:
        return
    pairs = [sample[BITS_PER_BYTE] for name in names for sample in results.samples[name]]
    bits, sizes = [-pair[0] / LN2 for pair in pairs], [pair[1] for pair in pairs]
    summary = results.summary
    result = {
        "name": group,
        "alias": alias,
        "sample_len": len(pairs),
        f"{BITS_PER_BYTE},none": bits_per_byte(pairs),
        f"{BITS_PER_BYTE}_stderr,none": ratio_error(bits, sizes),
    }
    summary["results"] = {group: result, **summary["results"]}
    summary.setdefault("groups", {})[group] = result
    summary["group_subtasks"][group] = names
    summary["higher_is_better"][group] = {BITS_PER_BYTE: False}
    summary["n-shot"][group] = 0


# Unigram baseline: bits of a text under the token frequencies of the training data.


def count_tokens(index: Path, vocab_size: int) -> np.ndarray:
    """int64[V]: frequency of each token in the training split of an `index` folder, over all sources."""
    prefixes = [path.with_suffix("") for path in sorted((index / "train").glob("*.idx"))]
    if not prefixes:
        raise InputError(f"{index / 'train'}: no .idx file; run the stage `index`")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for prefix in prefixes:
        reader = IndexedReader(prefix)
        reader.check_ids(vocab_size, prefix.name)
        tokens = reader.tokens
        for part in np.array_split(tokens, 1 + len(tokens) // (1 << 24)):
            counts += np.bincount(part, minlength=vocab_size)
    return counts


def unigram_bits(counts: np.ndarray, text: HeldOutDocument, tokenizer: TextTokenizer) -> float:
    """Bits of the text under the unigram model, in the model's own tokens."""
    return unigram_bits_per_byte(counts, tokenizer.encode(text.text), num_bytes=1)


# Example continuations of held-out texts for the report.

PROMPT_TOKENS = 48


class Continuation(Config):
    """prompt: beginning of a held-out document; reference: its real continuation; greedy, sampled: the model's."""

    source: str
    doc_id: str
    prompt: str
    reference: str
    greedy: str
    sampled: str


def continuations(
    causal_lm: CausalLM,
    tokenizer: TextTokenizer,
    documents: Mapping[str, Sequence[HeldOutDocument]],
    config: EvaluateConfig,
) -> list[Continuation]:
    """Continuations of config.num_continuations documents, from the sources in turn; prompts are their first tokens."""
    chosen = _first_of_each_source(documents, config.num_continuations, tokenizer)
    prompt_tokens = max(1, min(PROMPT_TOKENS, causal_lm.sequence_length - config.continuation_tokens))
    encoded = [list(tokenizer.encode(document.text[:4000])) for document in chosen]
    model_tokenizer = ModelTokenizer.of(tokenizer)
    begin = [*model_tokenizer.prompt_prefix]
    prompts = [[*begin, *ids[:prompt_tokens]][:prompt_tokens] for ids in encoded]
    greedy = generate(causal_lm, model_tokenizer, prompts, GenerationSettings(config.continuation_tokens))
    sampled = generate(
        causal_lm, model_tokenizer, prompts, GenerationSettings(config.continuation_tokens, config.sampling)
    )
    return [
        Continuation(
            source=document.source,
            doc_id=document.doc_id,
            prompt=tokenizer.decode(prompt[len(begin) :]),
            reference=tokenizer.decode(ids[len(prompt) - len(begin) :][: config.continuation_tokens]),
            greedy=plain.text,
            sampled=drawn.text,
        )
        for document, ids, prompt, plain, drawn in zip(chosen, encoded, prompts, greedy, sampled, strict=True)
    ]


def _first_of_each_source(
    documents: Mapping[str, Sequence[HeldOutDocument]], count: int, tokenizer: TextTokenizer
) -> list[HeldOutDocument]:
    """`count` documents with more than PROMPT_TOKENS tokens: the first of each source, then the second, and so on."""
    long_enough = {
        source: [
            document for document in source_documents if len(tokenizer.encode(document.text[:2000])) > PROMPT_TOKENS
        ][:count]
        for source, source_documents in (
            (source, source_documents[: 20 * count]) for source, source_documents in sorted(documents.items())
        )
    }
    turns = [(turn, source) for turn in range(count) for source in long_enough]
    taken = [long_enough[source][turn] for turn, source in turns if turn < len(long_enough[source])]
    return taken[:count]


# Scores on contaminated and on clean questions, by what the decontamination of the corpus found.

LEFT_IN = "annotated"  # outcome of a document that stays in the corpus with its match

ContaminatedQuestions = dict[
    str, dict[int, bool]
]  # benchmark -> question found in the corpus -> is it still in some document?


def contaminated_questions(curate: Path) -> ContaminatedQuestions:
    """Questions that the stage `curate` found in the corpus, by benchmark and number in the task; {} without
    decontamination.

    Raises InputError on a damaged file."""
    folder = curate / DECONTAMINATION_FOLDER
    report, questions = folder / REPORT_JSON, folder / QUESTIONS_NAME
    if not questions.is_file():
        return {}
    path = report
    try:
        contaminated: ContaminatedQuestions = {name: {} for name in json.loads(report.read_bytes())}
        path = questions
        for line in questions.read_text("utf-8").splitlines():
            question = json.loads(line)
            if question["example"].isdecimal():
                left_in = any(document["outcome"] == LEFT_IN for document in question["documents"])
                contaminated.setdefault(question["benchmark"], {})[int(question["example"])] = left_in
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); run the stage `curate` again") from error
    return contaminated


def contamination_rows(results: TaskResults, contamination: Mapping[str, Mapping[int, bool]]) -> list[ScoreRow]:
    """Rows "TASK, clean" and "TASK, contaminated" for every task with contaminated questions.

    Also adds the scores to results.summary["contamination"], and to results.notes a note for each task that was
    searched for."""
    rows: list[ScoreRow] = []
    for name, samples in results.samples.items():
        known = contamination.get(name.removeprefix(OURS))
        if known is None or name not in results.tasks:
            continue
        questions = {sample["doc_id"] for sample in samples}
        contaminated = questions & known.keys()
        left_in = sum(known[doc_id] for doc_id in contaminated)
        results.notes.append(
            f"{name}: {len(contaminated)} of {len(questions)} questions were found in the corpus (contaminated): "
            f"{len(contaminated) - left_in} were removed from it before training, {left_in} are still in it"
        )
        if not contaminated:
            continue
        stated = results.summary.setdefault("contamination", {}).setdefault(name, {"left_in_corpus": left_in})
        for part, is_held in (("clean", False), ("contaminated", True)):
            chosen = [sample for sample in samples if (sample["doc_id"] in contaminated) == is_held]
            result = _result(results, name, chosen)
            stated[part] = {"sample_len": len({sample["doc_id"] for sample in evaluated(chosen)}), **result}
            alias = results.summary["results"][name].get("alias", name).strip()
            rows += rows_of(name, {"alias": f"{alias}, {part}", **result}, results.summary, {name: chosen}, {})
    return rows


def _result(results: TaskResults, name: str, chosen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    kept = evaluated(chosen)
    result = scores(results.tasks[name], kept)
    for key, score in list(result.items()):
        metric, chosen_filter = key.split(",", 1)
        values = [sample[metric] for sample in kept if metric in sample and sample["filter"] == chosen_filter]
        error = standard_error(metric, values, score)
        if error is not None and math.isfinite(error):
            result[f"{metric}_stderr,{chosen_filter}"] = error
    return result
