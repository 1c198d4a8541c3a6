"""Documents of every shared corpus, and a table of the decisions in which two filters differ."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import zstandard

from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract

MOST_CHARS = 30_000  # spaCy reads 0.2 MB a second
# A heading of a whole article: " = Title = ", not " = = Section = = ".
ARTICLE = re.compile(r"\n(?= = [^=])")


def varied_documents(corpora: Path, every: int = 1) -> list[tuple[str, str]]:
    """(corpus, text) of some 3,500 documents: meeting notes, two editions of a book on Rust, command pages in fourteen
    languages, chapters of novels, articles and paragraphs of an encyclopedia. every: only each so-manieth."""
    named = {
        "kubernetes": _texts(corpora / "kubernetes_community.jsonl.zst"),
        "rust_book": _texts(corpora / "rust_book.jsonl.zst"),
        "rust_by_example": _texts(corpora / "rust_by_example.jsonl.zst"),
        "tldr": _texts(corpora / "tldr.jsonl.zst")[::28],
        "books": _chapters(corpora / "books_xhtml.jsonl.zst", 4),
    }
    plain = "\n".join(_raw(corpora / f"wikitext2_{part}.txt.zst") for part in ("test", "valid"))
    named["wikitext articles"] = ARTICLE.split(plain)
    named["wikitext paragraphs"] = [line.strip() for line in plain.split("\n") if len(line) > 200][::5]
    found = [(name, text) for name, texts in named.items() for text in texts if text and len(text) < MOST_CHARS]
    return found[::every]


def differences(
    corpora: Sequence[str], ours: Mapping[int, str], theirs: Mapping[int, str]
) -> Iterator[tuple[int, str, str, str]]:
    """(documents, our reason, their reason, corpora) of every class of documents that only one of two judges drops, the
    largest class first. ours, theirs: place of a dropped document -> the rule that took it."""
    classes: dict[tuple[str, str], Counter] = {}
    for place in set(ours) ^ set(theirs):
        reasons = (ours.get(place, "kept"), theirs.get(place, "kept"))
        classes.setdefault(reasons, Counter())[corpora[place]] += 1
    for (own, other), held in sorted(classes.items(), key=lambda item: (-item[1].total(), item[0])):
        yield held.total(), own, other, ", ".join(f"{name} {count}" for name, count in held.most_common(3))


def _raw(path: Path) -> str:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read().decode()


def records(path: Path) -> Iterator[dict]:
    with path.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            yield json.loads(line)


def _texts(path: Path) -> list[str]:
    return [record["text"] for record in records(path) if record.get("language") != "md"]


def _chapters(path: Path, every: int) -> list[str]:
    chapters = []
    for record in list(records(path))[::every]:
        try:
            chapters.append(extract(record["html"].encode(), "utf-8", "resiliparse"))
        except NotExtracted:
            continue
    return chapters
