"""Suites: names for lists of tasks."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets.config
import huggingface_hub.constants
import lm_eval.tasks
from lm_eval.tasks._yaml_loader import load_yaml

from gristmill.evaluation.tasks.loaders import COMPRESSIONS, find, load
from gristmill.foundation.errors import InputError

# lm-eval's multilingual tasks over local files: its prompts and metrics, our loader.
#
# A task reads benchmarks/NAME.jsonl below the data folder, one record a line with the fields of the hub's copy; its
# few-shot examples are in NAME_train.jsonl. `flores_LANGUAGE` is the perplexity of the sentences of FLORES, whose own
# files (benchmarks/flores/eng_Latn.devtest, a sentence a line) are read.

THEIRS = Path(lm_eval.tasks.__file__).parent
BENCHMARKS = "benchmarks"
FLORES = "flores"
FLORES_SUFFIXES = (".devtest", ".dev")


@dataclass(frozen=True)
class TaskFamily:
    """Tasks of one benchmark. folder: of lm-eval's files. prefix: of the names of its tasks, PREFIX_LANGUAGE. fields:
    of a record. chance: of a guess."""

    folder: str
    prefix: str
    file_prefix: str
    languages: tuple[str, ...]
    fields: tuple[str, ...]
    chance: float

    def names(self) -> list[str]:
        return [f"{self.prefix}_{language}" for language in self.languages]


STORY = ("input_sentence_1", "input_sentence_2", "input_sentence_3", "input_sentence_4")
FAMILIES = (
    TaskFamily(
        "xnli", "xnli", "xnli",
        ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),
        ("premise", "hypothesis", "label"), 1 / 3,
    ),
    TaskFamily(
        "xcopa", "xcopa", "default",
        ("et", "ht", "id", "it", "qu", "sw", "ta", "th", "tr", "vi", "zh"),
        ("premise", "choice1", "choice2", "question", "label"), 1 / 2,
    ),
    TaskFamily(
        "xstorycloze", "xstorycloze", "default",
        ("ar", "en", "es", "eu", "hi", "id", "my", "ru", "sw", "te", "zh"),
        (*STORY, "sentence_quiz1", "sentence_quiz2", "answer_right_ending"), 1 / 2,
    ),
    TaskFamily(
        "xwinograd", "xwinograd", "xwinograd",
        ("en", "fr", "jp", "pt", "ru", "zh"), ("sentence", "option1", "option2", "answer"), 1 / 2,
    ),
    TaskFamily(
        "paws-x", "paws", "paws",
        ("de", "en", "es", "fr", "ja", "ko", "zh"), ("sentence1", "sentence2", "label"), 1 / 2,
    ),
)  # fmt: skip
SOURCE = {"jp": "ja"}  # lm-eval's own code of a language


def multilingual_suites() -> dict[str, list[str]]:
    """Suites of each benchmark by its prefix, and of all together."""
    by_family = {family.prefix: family.names() for family in FAMILIES}
    return {**by_family, "multilingual": [name for names in by_family.values() for name in names]}


def multilingual_configs(data: Path | None) -> Iterator[dict[str, Any]]:
    """lm-eval's config of every task, over local files; and the group `flores` if its files are there."""
    for family in FAMILIES:
        for language in family.languages:
            yield _config(family, language)
    files = flores_files(data)
    for language, file in files.items():
        yield _flores(language, file)
    if files:
        yield {"group": FLORES, "task": [f"{FLORES}_{language}" for language in files]}


def family_of(task: str) -> tuple[str, str] | None:
    """(prefix, language) of a task of ours, flores included; None for others."""
    for prefix in [*(family.prefix for family in FAMILIES), FLORES]:
        if task.startswith(f"{prefix}_"):
            language = task.removeprefix(f"{prefix}_")
            return prefix, SOURCE.get(language, language)
    return None


def _config(family: TaskFamily, language: str) -> dict[str, Any]:
    config = load_yaml(THEIRS / family.folder / f"{family.file_prefix}_{language}.yaml")
    name, split = f"{family.prefix}_{language}", config.get("test_split") or config["validation_split"]
    for key in ("dataset_path", "dataset_name", "validation_split", "test_split"):
        config.pop(key, None)
    return {
        **config,
        "task": name,
        "custom_dataset": load,
        "dataset_kwargs": {
            "file": f"{BENCHMARKS}/{name}.jsonl",
            "fewshot_file": f"{BENCHMARKS}/{name}_train.jsonl",
            "fields": list(family.fields),
            "split": split,
        },
        "training_split": "train",
        "test_split" if config.get("test_split") or split == "test" else "validation_split": split,
        "metadata": {**(config.get("metadata") or {}), "chance": family.chance},
    }


def flores_files(data: Path | None) -> dict[str, str]:
    """Language -> its file below the data folder; devtest goes before dev."""
    files: dict[str, str] = {}
    if data is None:
        return files
    for suffix in FLORES_SUFFIXES:
        for packed in COMPRESSIONS:
            for path in sorted((data / BENCHMARKS / FLORES).glob(f"*{suffix}{packed}")):
                name = path.name.removesuffix(packed)
                files.setdefault(name.removesuffix(suffix), f"{BENCHMARKS}/{FLORES}/{name}")
    return dict(sorted(files.items()))


def _flores(language: str, file: str) -> dict[str, Any]:
    """A sentence is a document. bits_per_byte compares models, byte_perplexity is 2 to its power."""
    return {
        "task": f"{FLORES}_{language}",
        "custom_dataset": load,
        "dataset_kwargs": {"file": file, "fields": ["text"], "form": "lines", "split": "test"},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        ],
        "num_fewshot": 0,
        "metadata": {"version": 1.0, "source": "FLORES-200 (arXiv 2207.04672)"},
    }


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


# Disable network access of datasets and huggingface_hub: a download fails at once with a clear error.

VARIABLES = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SWITCHES: tuple[tuple[Any, str], ...] = (
    (huggingface_hub.constants, "HF_HUB_OFFLINE"),
    (datasets.config, "HF_HUB_OFFLINE"),
)


@contextmanager
def offline(wanted: bool = True) -> Iterator[None]:
    """Disables network access. The two libraries read the environment only at import, so their flags are set too."""
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in VARIABLES}
    values = [getattr(module, name) for module, name in SWITCHES]
    os.environ.update(VARIABLES)
    for module, name in SWITCHES:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(SWITCHES, values, strict=True):
            setattr(module, name, value)
        for name, old in before.items():
            os.environ.pop(name) if old is None else os.environ.update({name: old})
