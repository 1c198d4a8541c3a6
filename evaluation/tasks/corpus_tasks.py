"""Tasks made from the held-out documents of a corpus: bits per byte by source, and the true next line among four."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from gristmill.foundation.errors import InputError

DOCUMENT_BYTES = 16_384  # of one document at most, so that a few long ones do not stand for a whole source
CONTEXT_BYTES = 500  # what a cloze question shows before the line, at most
CONTEXT_LINES = 3  # and at least
LINE_BYTES = (20, 160)  # lines that can be asked for: longer than a brace, shorter than a paragraph
LENGTH_RATIO = 1.5  # a wrong line is at most so much longer or shorter than the right one: length must not tell


@dataclass(frozen=True)
class HeldOutDocument:
    """One held-out document."""

    doc_id: str
    source: str
    text: str


@dataclass(frozen=True)
class ClozeQuestion:
    """Which of `choices` (whole lines, with their indentation) stood after `context`? choices[gold] did."""

    doc_id: str
    source: str
    context: str
    choices: tuple[str, ...]
    gold: int


def read_held_out(curate: Path) -> dict[str, list[HeldOutDocument]]:
    """Source -> its `test` documents in canonical order; read from the folder of the stage `curate`."""
    found: dict[str, list[HeldOutDocument]] = {}
    for path in sorted((curate / "documents" / "test").glob("*.parquet")):
        table = pq.read_table(path, columns=["doc_id", "source", "text"])
        for doc_id, source, text in zip(*(column.to_pylist() for column in table.columns), strict=True):
            found.setdefault(source, []).append(HeldOutDocument(doc_id, source, text))
    return found


def bits_per_byte_texts(documents: Sequence[HeldOutDocument], text_bytes: int) -> list[HeldOutDocument]:
    """The beginnings of documents, whole lines up to DOCUMENT_BYTES each, until text_bytes are together."""
    taken: list[HeldOutDocument] = []
    total = 0
    for document in documents:
        if total >= text_bytes:
            break
        text = _beginning(document.text, min(DOCUMENT_BYTES, text_bytes - total))
        if text.strip():
            taken.append(HeldOutDocument(document.doc_id, document.source, text))
            total += len(text.encode())
    return taken


def _beginning(text: str, max_bytes: int) -> str:
    """Whole lines of at most max_bytes; if the first line alone is longer, its beginning."""
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text
    cut = raw[:max_bytes].decode(errors="ignore")
    return cut[: cut.rfind("\n") + 1] or cut


def cloze_questions(
    documents: Mapping[str, Sequence[HeldOutDocument]], items: int, choices: int, seed: int
) -> list[ClozeQuestion]:
    """At most `items` questions, as many from each source as can be, the same for the same documents and seed.

    Wrong lines come from other documents of the same source, of about the same length. Questions are spread over the
    documents: a document gives its second one only when each has given its first."""
    rng = np.random.default_rng([seed, _PURPOSE])
    per_source = [list(islice(_questions(documents[source], choices, rng), items)) for source in sorted(documents)]
    taken: list[ClozeQuestion] = []
    share = max(1, -(-items // max(1, len(per_source))))
    for questions in per_source:
        taken += questions[:share]
    spare = [question for questions in per_source for question in questions[share:]]
    return (taken + spare)[:items]


_PURPOSE = 0x636C6F7A  # "cloz": keeps this stream of random numbers apart from every other use of the seed


def _questions(documents: Sequence[HeldOutDocument], choices: int, rng: np.random.Generator) -> Iterator[ClozeQuestion]:
    lines = [_lines_to_ask(document.text) for document in documents]
    pool = [(owner, line) for owner, found in enumerate(lines) for _, line in found]
    pool_bytes = np.array([len(line.encode()) for _, line in pool])
    pool_owner = np.array([owner for owner, _ in pool])
    shuffled = [rng.permutation(len(found)) for found in lines]
    for turn in range(max((len(found) for found in lines), default=0)):
        for owner in rng.permutation(len(documents)):
            if turn >= len(lines[owner]):
                continue
            context, line = lines[owner][shuffled[owner][turn]]
            wrong = _wrong_lines(line, int(owner), pool, pool_owner, pool_bytes, choices - 1, rng)
            if wrong:
                gold = int(rng.integers(choices))
                listed = (*wrong[:gold], line, *wrong[gold:])
                document = documents[owner]
                yield ClozeQuestion(document.doc_id, document.source, context, listed, gold)


def _lines_to_ask(text: str) -> list[tuple[str, str]]:
    """(what stands before it, line) for each line that can be asked for; the line break between belongs to neither."""
    found = []
    lines = text.split("\n")
    for index in range(CONTEXT_LINES, len(lines)):
        line = lines[index].rstrip()
        asked = LINE_BYTES[0] <= len(line.strip().encode()) <= LINE_BYTES[1] and any(map(str.isalpha, line))
        if asked and lines[index - 1].strip():
            context = _end("\n".join(lines[max(0, index - 60) : index]))
            if len(context.strip().split("\n")) >= CONTEXT_LINES:
                found.append((context, line))
    return found


def _end(text: str) -> str:
    """Whole last lines of at most CONTEXT_BYTES, trailing white space removed, so that a line break alone follows."""
    text = text.rstrip()
    raw = text.encode()
    if len(raw) <= CONTEXT_BYTES:
        return text
    cut = raw[-CONTEXT_BYTES:].decode(errors="ignore")
    return cut[cut.find("\n") + 1 :]


def _wrong_lines(
    line: str,
    owner: int,
    pool: Sequence[tuple[int, str]],
    pool_owner: np.ndarray,
    pool_bytes: np.ndarray,
    count: int,
    rng: np.random.Generator,
) -> list[str]:
    """`count` different lines of other documents, about as long as `line`; empty if there are not so many."""
    length = len(line.encode())
    near = (pool_bytes <= length * LENGTH_RATIO) & (pool_bytes >= length / LENGTH_RATIO) & (pool_owner != owner)
    candidates = np.flatnonzero(near)
    wrong: list[str] = []
    for index in candidates[rng.permutation(len(candidates))[: 8 * count]]:
        other = pool[index][1]
        if other.strip() != line.strip() and other not in wrong:
            wrong.append(other)
        if len(wrong) == count:
            return wrong
    return []


def require_questions(questions: Sequence[ClozeQuestion], curate: Path) -> None:
    if not questions:
        raise InputError(
            f"{curate}: the held-out documents give no cloze question, which takes lines of {LINE_BYTES[0]} to "
            f"{LINE_BYTES[1]} bytes after {CONTEXT_LINES} others in two documents of one source; take more data, or "
            "leave cloze out of evaluate.tasks"
        )
