"""Every regular expression that meets the text of records, and every library called on it, takes linear time.

Each meets 300 kB made to be expensive: a quadratic one needs 4.5 x 10^10 steps, several minutes on any machine, and a
linear one takes seconds, so the bound of a minute of CPU time is far from both."""

import ast
import contextlib
import functools
import importlib
import multiprocessing
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.data_pipeline.annotate.list_file import BadWords
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig, normalize_texts
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract
from gristmill.data_pipeline.filters.lines import edit_c4, edit_refinedweb
from gristmill.data_pipeline.filters.pii import PII_KINDS, PiiConfig, count_pii, pii_domain, pii_pattern, replace_pii
from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.readers.python_docs import prose
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import LanguageConfig, detect, split_paragraphs
from gristmill.data_pipeline.signals.reference import abbreviation_pattern

ROOT = Path(__file__).parents[2]
FOLDERS = ("data_pipeline", "tokenizers", "evaluation", "training")
SIZE = 300_000
BOUND_SECONDS = 60

# Modules whose expressions read options, names and messages of libraries, never a record's text.
NOT_TEXT = {
    "data_pipeline/corpus/document_history.py": "a document id",
    "data_pipeline/readers/python_records.py": "a revision",
    "data_pipeline/readers/files.py": "a path",
    "foundation/config.py": "a recipe's numbers",
    "tokenizers/pretrained.py": "a tokenizer's name in a recipe",
    "evaluation/convert/safetensors_folder.py": "a library's error message",
    "data_pipeline/filters/threshold_sweep.py": "a sweep's range",
    "evaluation/results/table.py": "a task's name",
    "evaluation/tasks/corpus_tasks.py": "a language's tag",
    "tokenizers/train_tokenizer.py": "a message of SentencePiece",
}
# Expressions that are only asked whether a text begins with them (match) or is one (fullmatch).
ANCHORED = {
    "_COUNTER": "fullmatch",
    "_BEGINS": "match",
    "_BLANK_LINE": "fullmatch",
    "_XML": "match",
    "_FIRST_TAG": "match",
    "_LANGUAGE": "fullmatch",
    "_ENVIRONMENT": "match",
}

REPEATED = (" ", "a", "[", "(", "a@", "a.", "1.", "1 ", "<", "\n", " \n", "<!--", '"""\n\\')
MORE_REPEATED = (
    "\t", "\r", "\u2028", "A", "é", "中", "1", "1,", "1-", "+1 ", "[1", "{", "a@a.", "%a", "_", "-", "&", "&#", "&amp",
    "\\", '"', "'", '"""', "#", "1.1.1.1.", "$", "http://a.b/", "https://", "<div>", "<meta ", "charset=", "\x80",
    "\x1b[", "Ã", "Ã©", "â‚", "Â\xa0", " read more", "\u0301", "e\u0301", "ﬁ", "red ", "(555) 123-", "a:", ". ", "…",
    "a: b 12345678901234 ",
)  # fmt: skip
ENDS = ("", "x", "Ã©")  # the last makes ftfy look at a text that is ASCII otherwise


def texts(size: int) -> Iterator[str]:
    """The few that have been expensive before, at this size; all, with every end, at a fiftieth of it."""
    for piece in REPEATED:
        yield piece * (size // len(piece)) + "x"
    for piece in (*REPEATED, *MORE_REPEATED):
        for end in ENDS:
            yield piece * (size // 50 // len(piece)) + end


# Without parsing: each worker of the tests collects these.
CALL_OF_RE = re.compile(r"\b(?:re|regex)\.(?!escape\b)\w+\(")


@functools.cache
def module_patterns() -> dict[str, re.Pattern]:
    """Module, name and index in a tuple -> compiled expression, of the modules that meet text."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if relative in NOT_TEXT or not CALL_OF_RE.search(path.read_text()):
                continue
            module = importlib.import_module("gristmill." + relative.removesuffix(".py").replace("/", "."))
            for name, value in vars(module).items():
                for index, pattern in enumerate(value if isinstance(value, tuple) else [value]):
                    if isinstance(pattern, re.Pattern):
                        found[f"{relative}:{name}:{index}"] = pattern
    # compiled at their first use
    found["data_pipeline/filters/pii.py:domain:0"] = pii_domain()
    found["data_pipeline/signals/reference.py:abbreviation:0"] = abbreviation_pattern()
    return found | {f"data_pipeline/filters/pii.py:{kind}:0": pii_pattern(kind) for kind in PII_KINDS}


def calls_of_re(path: Path) -> list[ast.Call]:
    source = path.read_text()
    if not CALL_OF_RE.search(source):
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in ("re", "regex")
        and call.func.attr != "escape"
    ]


# Calls of re outside of constants, where the text is short or the expression is built of a user's words.
BUILT_LATER = {
    "data_pipeline/extraction/blocks.py": 6,  # bounded, and matched where their first bytes stand
    "data_pipeline/filters/pii.py": 1,  # separators of one phone number
    "data_pipeline/annotate/scan_tables.py": 1,  # all characters of a category
    "data_pipeline/annotate/list_file.py": 2,  # a phrase of the list; one character
    "evaluation/convert/model_tokenizer.py": 1,  # the begin and end tokens of a template, escaped
    "evaluation/tasks/harness.py": 1,  # the address in an object's repr
    "evaluation/inference/server/app.py": 2,  # the port of a header; control symbols, escaped
}


def test_no_expression_is_left_out():
    compiled: dict[str, int] = {}
    for name in module_patterns():
        relative = name.split(":")[0]
        compiled[relative] = compiled.get(relative, 0) + 1
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            if relative not in NOT_TEXT:
                known = compiled.get(relative, 0) + BUILT_LATER.get(relative, 0)
                assert len(calls_of_re(path)) <= known, f"{relative}: name its expressions in this test"


def search(pattern: re.Pattern, how: str) -> None:
    for text in texts(SIZE):
        subject: Any = text.encode("utf-8", "replace") if isinstance(pattern.pattern, bytes) else text
        if how == "search":
            for _ in pattern.finditer(subject):
                pass
        else:
            getattr(pattern, how)(subject)


@functools.cache
def all_within_one_bound() -> bool:
    """Whether one process searches with all expressions within the bound of one."""
    try:
        within_bound(search_all)
    except AssertionError:
        return False
    return True


def search_all() -> None:
    for name in module_patterns():
        search_with(name)


def search_with(name: str) -> None:
    search(module_patterns()[name], ANCHORED.get(name.split(":")[1], "search"))


@pytest.mark.parametrize("name", module_patterns())
def test_an_expression_is_linear(name):
    if not all_within_one_bound():  # a process for each then finds which
        within_bound(search_with, name)


C4, REFINEDWEB = (FilterChoice(preset=name).line_options() for name in ("c4", "refinedweb_lines"))
PII = PiiConfig(phone="replace")
WORDS = BadWords(["red", "red mill", "a a a b", "(", "é 1"])
FUNCTIONS: dict[str, Callable[[str], object]] = {
    "normalize": lambda text: normalize_texts(TextBuffer.of([text]), NormalizeConfig()),
    "edit_c4": lambda text: edit_c4(text, C4),
    "edit_refinedweb": lambda text: edit_refinedweb(text, REFINEDWEB),
    "replace_pii": lambda text: replace_pii(text, PII),
    "count_pii": lambda text: [count_pii(text, kind) for kind in PII_KINDS],
    "bad_words": WORDS.count,
    "split_paragraphs": split_paragraphs,
    "detect": lambda text: detect([text], LanguageConfig()),
}


def call(name: str, size: int) -> None:
    for text in texts(size):
        FUNCTIONS[name](text)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_texts_is_linear(name):
    within_bound(call, name, SIZE)


def fully_normalized(size: int) -> None:
    for text in texts(size):
        normalize_texts(TextBuffer.of([text]), NormalizeConfig(ftfy="full"))


@pytest.mark.slow  # ftfy takes 40 microseconds for an empty line: a megabyte of them is linear, and 40 seconds
def test_ftfy_in_full_is_linear():
    within_bound(fully_normalized, SIZE)


def extracted(extractor: str, size: int) -> None:
    for text in texts(size):
        with contextlib.suppress(NotExtracted):
            extract(f"<html><body><p>{text}</p></body></html>".encode("utf-8", "replace"), None, extractor)


@pytest.mark.parametrize("extractor", ["blocks", "resiliparse", pytest.param("trafilatura", marks=pytest.mark.slow)])
def test_extraction_is_linear(extractor):
    within_bound(extracted, extractor, SIZE // 10)


def read_modules(size: int) -> None:
    for text in texts(size):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            prose(text)


def test_reading_python_is_linear():
    within_bound(read_modules, SIZE // 10)


def bounded(function: Callable[..., None], *args: object) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (BOUND_SECONDS, BOUND_SECONDS + 5))
    function(*args)


def within_bound(function: Callable[..., None], *args: object) -> None:
    """Runs the function in a process of its own, which is ended at the bound."""
    process = multiprocessing.get_context("fork").Process(target=bounded, args=(function, *args))
    process.start()
    process.join()
    assert process.exitcode != -signal.SIGXCPU, f"not done within {BOUND_SECONDS} s of CPU time"
    assert process.exitcode == 0
