"""Write a results folder: results.json in lm-eval's layout, samples/*.jsonl, table.md, table.html."""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.evaluation.results.table import ScoreRow, html, markdown
from gristmill.foundation.files import write_atomic


def write_results(
    folder: Path,
    summary: Mapping[str, Any],
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    rows: Sequence[ScoreRow],
    notes: Sequence[str],
) -> None:
    """Writes all files of a results folder. They hold no time, path or machine: same scores, same bytes."""
    for name, found in samples.items():
        lines = "".join(json.dumps(_plain(sample), ensure_ascii=False) + "\n" for sample in found)
        write_atomic(folder / "samples" / f"{_file_name(name)}.jsonl", lines.encode())
    whole = {
        **summary,
        "verdicts": verdicts(rows),
        "task_hashes": {name: task_hash(found) for name, found in samples.items()},
        "lm_eval_version": importlib.metadata.version("lm_eval"),
    }
    text = json.dumps(_plain(whole), indent=2, ensure_ascii=False, sort_keys=True)
    write_atomic(folder / "results.json", text.encode() + b"\n")
    write_atomic(folder / "table.md", markdown(rows, notes).encode())
    write_atomic(folder / "table.html", html(rows, notes, "Scores").encode())


def verdicts(rows: Sequence[ScoreRow]) -> dict[str, dict[str, Any]]:
    """{task: {metric: {...}}} as in the table: number of questions, skipped questions, chance level, p-value,
    verdict."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row.task, {})[row.metric] = {
            "n": row.count,
            "not_evaluated": row.not_evaluated,
            "chance": row.chance,
            "p_value": None if row.verdict is None else row.verdict.p,
            "verdict": None if row.verdict is None else str(row.verdict),
        }
    return found


def task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over the hashes of documents, prompts and targets: equal if two models had the same questions."""
    parts = [sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """JSON values: numpy numbers as Python's; NaN and infinities as strings, since JSON has none."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value not in (float("inf"), float("-inf")) and value == value:
        return value
    return str(value) if isinstance(value, float) else value


def _file_name(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", task)
