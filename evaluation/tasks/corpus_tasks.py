"""Tasks from the held-out documents of a corpus: bits per byte by source, and cloze, the choice of the next line."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from babel import Locale, UnknownLocaleError
from babel.core import get_global
from datasets import Dataset

from gristmill.data_pipeline.indexed.language_shares import language_tag
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import ALIASES, text_scripts
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.workdir import HeldOutCorpus
from gristmill.foundation.errors import InputError, RecipeError

DOCUMENT_BYTES = 16_384  # maximum of one document, so that a few long ones do not dominate a source
CONTEXT_BYTES = 500  # maximum context of a cloze question
CONTEXT_LINES = 3  # minimum context of a cloze question
LINE_BYTES = (20, 160)  # of a line that can be an answer: longer than a brace, shorter than a paragraph
USUAL_SCRIPT_SHARE = 0.05
LENGTH_RATIO = 1.5  # maximum ratio of the lengths of wrong and right line, so that length is no clue


@dataclass(frozen=True)
class HeldOutDocument:
    """One held-out document. language: empty where it is not known."""

    doc_id: str
    source: str
    text: str
    language: str = ""


@dataclass(frozen=True)
class ClozeQuestion:
    """Which of `choices` (whole lines with their indentation) follows `context`? choices[gold] does."""

    doc_id: str
    source: str
    context: str
    choices: tuple[str, ...]
    gold: int


def read_held_out(curate: Path) -> dict[str, list[HeldOutDocument]]:
    """{source: its `test` documents in canonical order}, from the folder of the stage `curate`."""
    held_out: dict[str, list[HeldOutDocument]] = {}
    for path in sorted((curate / "documents" / "test").glob("*.parquet")):
        table = pq.read_table(path, columns=["doc_id", "source", "text", "language"])
        for doc_id, source, text, language in zip(*(column.to_pylist() for column in table.columns), strict=True):
            held_out.setdefault(source, []).append(HeldOutDocument(doc_id, source, text, language or ""))
    return held_out


def by_language(documents: Mapping[str, Sequence[HeldOutDocument]]) -> dict[str, list[HeldOutDocument]]:
    """{"ar_Arab": documents}: the documents of all sources by language, with the language's script."""
    by_code: dict[str, list[HeldOutDocument]] = {}
    for of_source in documents.values():
        for document in of_source:
            by_code.setdefault(language_tag(document.language), []).append(document)
    return {
        f"{language}_{_script(language, of_language)}": of_language for language, of_language in sorted(by_code.items())
    }


def _script(language: str, documents: Sequence[HeldOutDocument]) -> str:
    """The usual script of the language if enough documents are in it, else that of most: pages with much code in them
    have more Latin letters than others, in any language."""
    counted = Counter(text_scripts(TextBuffer.of([document.text for document in documents])))
    usual = likely_script(language)
    if usual is not None and counted[usual] >= USUAL_SCRIPT_SHARE * len(documents):
        return usual
    return min(counted, key=lambda script: (-counted[script], script))


def bits_per_byte_texts(documents: Sequence[HeldOutDocument], text_bytes: int) -> list[HeldOutDocument]:
    """The first DOCUMENT_BYTES of each document, in whole lines, until they have text_bytes together."""
    taken: list[HeldOutDocument] = []
    total = 0
    for document in documents:
        if total >= text_bytes:
            break
        text = _beginning(document.text, min(DOCUMENT_BYTES, text_bytes - total))
        if text.strip():
            taken.append(replace(document, text=text))
            total += len(text.encode())
    return taken


def _beginning(text: str, max_bytes: int) -> str:
    """The first whole lines of at most max_bytes; if the first line is longer, its first max_bytes."""
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text
    cut = raw[:max_bytes].decode(errors="ignore")
    return cut[: cut.rfind("\n") + 1] or cut


def cloze_questions(
    documents: Mapping[str, Sequence[HeldOutDocument]], items: int, choices: int, seed: int
) -> list[ClozeQuestion]:
    """At most `items` questions, evenly over the sources; deterministic in documents and seed.

    Wrong lines are lines of other documents of the same source, of about the same length. Questions are spread over the
    documents: the second question of a document comes after the first of every other."""
    rng = np.random.default_rng([seed, _PURPOSE])
    per_source = [list(islice(_questions(documents[source], choices, rng), items)) for source in sorted(documents)]
    taken: list[ClozeQuestion] = []
    share = max(1, -(-items // max(1, len(per_source))))
    for questions in per_source:
        taken += questions[:share]
    spare = [question for questions in per_source for question in questions[share:]]
    return (taken + spare)[:items]


_PURPOSE = 0x636C6F7A  # "cloz": a random stream of its own for the same seed


def _questions(documents: Sequence[HeldOutDocument], choices: int, rng: np.random.Generator) -> Iterator[ClozeQuestion]:
    lines = [_candidate_lines(document.text) for document in documents]
    pool = _LinePool.of(lines)
    shuffled = [rng.permutation(len(document_lines)) for document_lines in lines]
    for turn in range(max((len(document_lines) for document_lines in lines), default=0)):
        for owner in rng.permutation(len(documents)):
            if turn >= len(lines[owner]):
                continue
            context, line = lines[owner][shuffled[owner][turn]]
            wrong = pool.wrong_lines(line, int(owner), choices - 1, rng)
            if wrong:
                gold = int(rng.integers(choices))
                listed = (*wrong[:gold], line, *wrong[gold:])
                document = documents[owner]
                yield ClozeQuestion(document.doc_id, document.source, context, listed, gold)


def _candidate_lines(text: str) -> list[tuple[str, str]]:
    """(context, line) for each line that can be an answer; the line break between them is in neither."""
    candidates = []
    lines = text.split("\n")
    for index in range(CONTEXT_LINES, len(lines)):
        line = lines[index].rstrip()
        suitable = LINE_BYTES[0] <= len(line.strip().encode()) <= LINE_BYTES[1] and any(map(str.isalpha, line))
        if suitable and lines[index - 1].strip():
            context = _end("\n".join(lines[max(0, index - 60) : index]))
            if len(context.strip().split("\n")) >= CONTEXT_LINES:
                candidates.append((context, line))
    return candidates


def _end(text: str) -> str:
    """The last whole lines of at most CONTEXT_BYTES, without trailing white space."""
    text = text.rstrip()
    raw = text.encode()
    if len(raw) <= CONTEXT_BYTES:
        return text
    cut = raw[-CONTEXT_BYTES:].decode(errors="ignore")
    return cut[cut.find("\n") + 1 :]


@dataclass(frozen=True)
class _LinePool:
    """Candidate lines of one source. documents, num_bytes: int64[lines], of each line."""

    lines: list[str]
    documents: np.ndarray
    num_bytes: np.ndarray

    @classmethod
    def of(cls, lines: Sequence[Sequence[tuple[str, str]]]) -> "_LinePool":
        """lines: by document, as `_candidate_lines` returns them."""
        pool = [(document, line) for document, document_lines in enumerate(lines) for _, line in document_lines]
        return cls(
            [line for _, line in pool],
            np.array([document for document, _ in pool]),
            np.array([len(line.encode()) for _, line in pool]),
        )

    def wrong_lines(self, line: str, document: int, count: int, rng: np.random.Generator) -> list[str]:
        """`count` different lines of other documents, of about the same length; [] if there are too few."""
        length = len(line.encode())
        similar = (self.num_bytes <= length * LENGTH_RATIO) & (self.num_bytes >= length / LENGTH_RATIO)
        candidates = np.flatnonzero(similar & (self.documents != document))
        wrong: list[str] = []
        for index in candidates[rng.permutation(len(candidates))[: 8 * count]]:
            other = self.lines[index]
            if other.strip() != line.strip() and other not in wrong:
                wrong.append(other)
            if len(wrong) == count:
                return wrong
        return []


# lm-eval configs of the two held-out tasks. Each config contains its documents: nothing is read or downloaded.

BITS_PER_BYTE = "bits_per_byte"
CLOZE = "cloze"
HELD_OUT_TASKS = (BITS_PER_BYTE, CLOZE)
NO_QUESTION = (
    f"the held-out documents have no cloze question, which needs lines of {LINE_BYTES[0]} to {LINE_BYTES[1]} bytes "
    f"after {CONTEXT_LINES} others in two documents of one source"
)


def bits_per_byte_task(group: str, texts: Sequence[HeldOutDocument]) -> dict[str, Any]:
    """The rolling log-likelihood of the texts of one source or language."""
    return {
        "task": f"{BITS_PER_BYTE}_{group}",
        "task_alias": f"{BITS_PER_BYTE} {group}",
        "custom_dataset": documents_of([asdict(text) for text in texts]),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": BITS_PER_BYTE, "aggregation": BITS_PER_BYTE, "higher_is_better": False},
        ],
        "num_fewshot": 0,
        "metadata": {"version": 1.0, "source": f"held-out documents of {group}", "prompt": "end of document"},
    }


def cloze_task(questions: Sequence[ClozeQuestion]) -> dict[str, Any]:
    """Multiple choice of the next line. The line break before it is part of the answer.

    acc_mutual_info takes the line that the context makes likelier by the greatest factor, so that a line does not win
    by being common (Brown et al. 2020, arXiv 2005.14165, section 2.4); acc takes the likeliest."""
    choices = len(questions[0].choices)
    listed = [{**asdict(question), "choices": list(question.choices)} for question in questions]
    return {
        "task": CLOZE,
        "custom_dataset": documents_of(listed),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "\n",
        "metric_list": [
            {"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
        "num_fewshot": 0,
        "metadata": {
            "version": 1.0,
            "source": "held-out documents; wrong lines from other documents of the same source",
            "prompt": "the lines before it",
            "chance": 1 / choices,
        },
    }


def documents_of(records: Sequence[Mapping[str, Any]]) -> Callable[..., dict[str, Dataset]]:
    """lm-eval's `custom_dataset` with these records as its test split."""

    def load(**kwargs: Any) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(list(records))}

    return load


# Names of languages and scripts in tasks and tables.

LANGUAGE_AND_SCRIPT = re.compile(r"bits_per_byte_(?P<language>.+)_(?P<script>[A-Z][a-z]{3})")
SCRIPT = re.compile("[A-Z][a-z]{3}")


def task_alias(task: str) -> str:
    """The name in tables: bits_per_byte_ar_Arab -> "bits_per_byte ar_Arab"."""
    return task.replace("bits_per_byte_", "bits_per_byte ", 1)


def likely_script(language: str) -> str | None:
    """The script in which a language is usually written (CLDR), by the names of signals/language.py: ko -> "Hang"."""
    subtags = get_global("likely_subtags").get(re.split("[_-]", language)[0])
    script = subtags.split("_")[1] if subtags is not None and subtags.count("_") == 2 else None
    return ALIASES.get(script, script) if script is not None else None


def english_name(tag: str) -> str:
    """ar_Arab -> "Arabic", pt_BR -> "Portuguese (Brazil)"; the tag itself where the language is not known."""
    parts = [part for part in re.split("[_-]", tag) if not SCRIPT.fullmatch(part)]
    for length in range(min(2, len(parts)), 0, -1):
        try:
            return str(Locale.parse("_".join(parts[:length])).get_display_name("en"))
        except (UnknownLocaleError, ValueError):
            continue
    return tag


def answerable(config: EvaluateConfig, corpus: HeldOutCorpus | None) -> tuple[EvaluateConfig, str]:
    """(config without the cloze task if the held-out documents have no question for it, what to say of it or "").

    Raises as `held_out_documents` does, and InputError if no task is left. The stage `train` asks before it begins."""
    documents = held_out_documents(config, corpus)
    if CLOZE not in config.tasks or corpus is None:
        return config, ""
    if cloze_questions(documents, 1, config.cloze_choices, corpus.seed):
        return config, ""
    tasks = tuple(name for name in config.tasks if name != CLOZE)
    if not tasks:
        raise InputError(f"{corpus.curate}: {NO_QUESTION}; use more data, or other tasks in evaluate.tasks")
    return config.model_copy(update={"tasks": tasks}), f"cloze is left out: {NO_QUESTION}"


def held_out_documents(config: EvaluateConfig, corpus: HeldOutCorpus | None) -> Mapping[str, Sequence[HeldOutDocument]]:
    """The held-out documents by source, if config.tasks needs them. Raises RecipeError if there is no corpus,
    InputError if it has none."""
    wanted = [name for name in config.tasks if name in HELD_OUT_TASKS]
    if not wanted:
        return {}
    if corpus is None:
        raise RecipeError(f"{', '.join(wanted)} need the held-out documents: name the folder the run was made in")
    documents = read_held_out(corpus.curate)
    if not documents:
        raise InputError(
            f"{corpus.curate / 'documents' / 'test'}: no held-out document; raise the test share in curate.splits"
        )
    return documents
