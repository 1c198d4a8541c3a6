"""A row of the table of bad inputs: the call, its files, the exit code, the required words of the message.

A file of tests/bad_input/ is one area: a list CASES and one test, parametrised with `each(CASES)`, that calls the
fixture `expect_error`:

    CASES = [Case("heads", "check small.yaml", ("small.yaml:5", "heads=3"), files={"small.yaml": small("heads: 3")})]

    @each(CASES)
    def test_recipes(case, expect_error):
        expect_error(case)
"""

import copy
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

SMALL: dict[str, Any] = {
    "name": "small",
    "sources": [{"name": "notes", "format": "text", "paths": ["raw/*.txt"]}],
    "curate": {"splits": {"validation": 0.1, "test": 0.1}, "filters": [], "near_dedup": None},
    "tokenizer": {"vocab_size": 400},
    "model": {"layers": 2, "width": 16, "heads": 2, "sequence_length": 32},
    "train": {"tokens": 4096, "batch_tokens": 256, "precision": "fp32", "validation": {"every": 0}},
}
NOTES = "".join(f"The miller of mill {number} grinds {number * 7} sacks of grain.\n" for number in range(200))


@dataclass(frozen=True)
class Case:
    """name: unique in its area. command: as on the shell, run in a folder that holds `files` (path -> content).

    words: each must stand in the message, blanks counting as one space. code: 2 where the call or the recipe is wrong,
    1 where what it was given is. Every folder holds raw/notes.txt, and small.yaml that reads it, unless files names
    others. make: called with the folder, for what is no plain file. fixtures: fixtures whose values the command names
    in braces, such as {checkpoint}. environment: variables set for this call. never: words that must not stand there,
    beside a traceback's."""

    name: str
    command: str
    words: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    make: Callable[[Path], None] | None = None
    fixtures: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    never: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        for name, content in {"raw/notes.txt": NOTES, "small.yaml": small(), **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        if self.make is not None:
            self.make(folder)

    def arguments(self, values: Mapping[str, object]) -> list[str]:
        return shlex.split(self.command.format(**values) if values else self.command)


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def small(*changes: str) -> str:
    """The small recipe as YAML, with fields set: small("train.tokens: 1", "sources.0.paths: []").

    A value is YAML and is written into the text as it is given; a value of `-` takes the field away."""
    content = copy.deepcopy(SMALL)
    texts: dict[str, str] = {}
    for number, change in enumerate(changes):
        dotted, _, value = change.partition(": ")
        *parents, last = [int(key) if key.isdigit() else key for key in dotted.split(".")]
        inner = content
        for key in parents:
            inner = inner[key] if isinstance(inner, list) else inner.setdefault(key, {})
        if value == "-":
            del inner[last]
            continue
        texts[f"value{number}"] = value
        inner[last] = f"value{number}"
    text = yaml.safe_dump(content, sort_keys=False, width=1000, default_flow_style=None)
    for name, value in sorted(texts.items(), reverse=True):
        text = text.replace(name, value)
    return text
