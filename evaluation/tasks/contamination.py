"""Scores on contaminated and on clean questions, by what the decontamination of the corpus found."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.writer import DECONTAMINATION_FOLDER, QUESTIONS_NAME, REPORT_JSON
from gristmill.evaluation.results.statistics import evaluated, scores, standard_error
from gristmill.evaluation.results.table import ScoreRow, rows_of
from gristmill.evaluation.tasks.benchmark_texts import OURS
from gristmill.evaluation.tasks.harness import TaskResults
from gristmill.foundation.errors import InputError

LEFT_IN = "annotated"  # outcome of a document that stays in the corpus with its match

Found = dict[str, dict[int, bool]]  # benchmark -> question found in the corpus -> is it still in some document?


def found_in_corpus(curate: Path) -> Found:
    """Questions that the stage `curate` found in the corpus, by benchmark and number in the task; {} without
    decontamination.

    Raises InputError on a damaged file."""
    folder = curate / DECONTAMINATION_FOLDER
    report, questions = folder / REPORT_JSON, folder / QUESTIONS_NAME
    if not questions.is_file():
        return {}
    path = report
    try:
        contaminated: Found = {name: {} for name in json.loads(report.read_bytes())}
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
