"""Tasks from the held-out documents of a corpus: bits per byte by source, and cloze, the choice of the next line."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from gristmill.data_pipeline.indexed.language_shares import language_tag
from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.scripts import text_scripts
from gristmill.evaluation.tasks.language_names import likely_script
from gristmill.foundation.errors import InputError

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
    found: dict[str, list[HeldOutDocument]] = {}
    for path in sorted((curate / "documents" / "test").glob("*.parquet")):
        table = pq.read_table(path, columns=["doc_id", "source", "text", "language"])
        for doc_id, source, text, language in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found.setdefault(source, []).append(HeldOutDocument(doc_id, source, text, language or ""))
    return found


def by_language(documents: Mapping[str, Sequence[HeldOutDocument]]) -> dict[str, list[HeldOutDocument]]:
    """{"ar_Arab": documents}: the documents of all sources by language, with the language's script."""
    found: dict[str, list[HeldOutDocument]] = {}
    for of_source in documents.values():
        for document in of_source:
            found.setdefault(language_tag(document.language), []).append(document)
    return {
        f"{language}_{_script(language, of_language)}": of_language for language, of_language in sorted(found.items())
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
    shuffled = [rng.permutation(len(found)) for found in lines]
    for turn in range(max((len(found) for found in lines), default=0)):
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
    found = []
    lines = text.split("\n")
    for index in range(CONTEXT_LINES, len(lines)):
        line = lines[index].rstrip()
        suitable = LINE_BYTES[0] <= len(line.strip().encode()) <= LINE_BYTES[1] and any(map(str.isalpha, line))
        if suitable and lines[index - 1].strip():
            context = _end("\n".join(lines[max(0, index - 60) : index]))
            if len(context.strip().split("\n")) >= CONTEXT_LINES:
                found.append((context, line))
    return found


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
        pool = [(document, line) for document, found in enumerate(lines) for _, line in found]
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


def require_questions(questions: Sequence[ClozeQuestion], curate: Path) -> None:
    if not questions:
        raise InputError(
            f"{curate}: the held-out documents have no cloze question, which needs lines of {LINE_BYTES[0]} to "
            f"{LINE_BYTES[1]} bytes after {CONTEXT_LINES} others in two documents of one source; use more data, or "
            "remove cloze from evaluate.tasks"
        )
