"""Suites: names for lists of tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.evaluation.tasks.loaders import find
from gristmill.evaluation.tasks.multilingual import multilingual_suites
from gristmill.foundation.errors import InputError

SUITES = {
    # Megatron-Turing NLG 530B (arXiv 2201.11990), section 5.1
    "mtnlg": [
        "lambada_openai",
        "race",
        "boolq",
        "piqa",
        "gristmill_hellaswag",
        "winogrande",
        "anli_r1",
        "anli_r2",
        "anli_r3",
        "gristmill_hans",
        "wic",
    ],
    "small": [
        "lambada_openai",
        "gristmill_hellaswag",
        "piqa",
        "winogrande",
        "arc_easy",
        "arc_challenge",
        "openbookqa",
        "copa",
        "boolq",
        "blimp",
    ],
    **multilingual_suites(),
}

MAX_NOTES = 12  # on the absent files of a suite; more are one note


def expand(names: Sequence[str], index: Mapping[str, Any], data: Path | None) -> tuple[list[str], list[str]]:
    """(tasks, notes on skipped ones). Tasks of a suite whose file is absent are skipped; tasks named by themselves
    never are. index: lm-eval's, task name to entry."""
    tasks: list[str] = []
    notes: list[str] = []
    for name in names:
        if name not in SUITES:
            tasks.append(name)
            continue
        absent = {member: absent_file(member, index, data) for member in SUITES[name]}
        tasks += [member for member, reason in absent.items() if reason is None]
        skipped = {member: reason for member, reason in absent.items() if reason is not None}
        if len(skipped) > MAX_NOTES:
            notes.append(
                f"{len(skipped)} tasks of the suite {name} were skipped, whose files are absent: {', '.join(skipped)}"
            )
        else:
            notes += [f"{member} of the suite {name} was skipped: {reason}" for member, reason in skipped.items()]
    return list(dict.fromkeys(tasks)), notes


def absent_file(task: str, index: Mapping[str, Any], data: Path | None) -> str | None:
    """ "FILE is absent" if the task's file is, else None. Without its path, which differs between machines."""
    config = index[task].cfg
    first = index[config["task"][0]].cfg if isinstance(config["task"], list) else config
    file = first["dataset_kwargs"]["file"]
    try:
        find(file, None if data is None else str(data))
    except InputError:
        return f"{file} is absent"
    return None
