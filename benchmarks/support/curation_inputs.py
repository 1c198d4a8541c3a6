"""Raw files for whole runs of curation: JSONL, Parquet and WARC, each in two files, with numbered records.

The id of a record is FILE/NUMBER, both from 0, so that the results of two programs can be joined record by record."""

import gzip
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from support.decision_differences import records
from support.warc_file import page_record
from text import CORPORA, docstrings, documents

NUM_FILES = 2
COPIES, EDITED_COPIES = (
    0.04,
    0.04,
)  # shares of the records that repeat an earlier one, as it is or with one paragraph less
MIN_PARAGRAPH, MAX_PARAGRAPH = 120, 1200  # bytes; shorter ones are headings and menus
# The declaration's code in the shared file udhr.jsonl.zst, by language.
DECLARATIONS = {
    "ar": "arb", "de": "deu_1996", "en": "eng", "es": "spa", "fr": "fra", "hi": "hin", "id": "ind", "it": "ita",
    "ja": "jpn", "ko": "kor", "nl": "nld", "pt": "por_BR", "ru": "rus", "zh": "cmn_hans",
}  # fmt: skip
MIN_LETTERS = 0.75  # of the characters; code and tables have fewer


def paragraphs(folder: Path | None) -> list[str]:
    """English prose of --data, else of the shared corpora, else of docstrings, paragraph by paragraph, sorted."""
    texts = documents(folder, 40_000_000) if folder or CORPORA.is_dir() else docstrings()
    return sorted({part for text in texts for part in map(str.strip, text.split("\n\n")) if _is_prose(part)})


def _is_prose(part: str) -> bool:
    letters = sum(map(str.isalpha, part))
    return (
        MIN_PARAGRAPH <= len(part) <= MAX_PARAGRAPH
        and part.isascii()
        and part[0].isalpha()
        and part[-1] in ".!?"
        and letters >= MIN_LETTERS * len(part)
    )


def made_texts(pool: Sequence[str], num_bytes: int, mean_bytes: int, seed: int = 5) -> Iterator[str]:
    """Documents of about mean_bytes: paragraphs drawn at random, lengths lognormal; 8 % repeat an earlier document."""
    rng = random.Random(seed)
    written, before = 0, [""]
    while written < num_bytes:
        draw = rng.random()
        if draw < COPIES and before[-1]:
            parts = rng.choice(before).split("\n\n")
        elif draw < COPIES + EDITED_COPIES and before[-1].count("\n\n") > 5:
            parts = before[-1].split("\n\n")[1:]
        else:
            wanted, parts = mean_bytes * rng.lognormvariate(-0.08, 0.4), []
            while sum(map(len, parts)) < wanted:
                parts.append(rng.choice(pool))
        text = "\n\n".join(parts)
        before = [*before[-50:], text]
        written += len(text.encode())
        yield text


def language_texts(corpora: Path, languages: Sequence[str], num_bytes: int, mean_bytes: int) -> Iterator[str]:
    """Documents in these languages in turn, made as made_texts does of the paragraphs of the Universal Declaration of
    Human Rights."""
    declarations = {record["code"]: record["text"] for record in records(corpora / "udhr.jsonl.zst")}
    pools = [
        [line for line in declarations[DECLARATIONS[name]].split("\n") if len(line.encode()) >= MIN_PARAGRAPH]
        for name in languages
    ]
    share = num_bytes // len(pools)
    made = [made_texts(pool, share, mean_bytes, seed) for seed, pool in enumerate(pools)]
    for texts in itertools.zip_longest(*made):
        yield from (text for text in texts if text is not None)


def html_pages(shared: Path, num_pages: int | None) -> list[bytes]:
    """The annotated pages of the shared data."""
    folders = ("article_extraction/html", "trafilatura_eval")
    paths = [path for folder in folders for path in sorted((shared / "html" / folder).glob("*.html.gz"))]
    return [gzip.decompress(path.read_bytes()) for path in paths[:num_pages]]


def write_jsonl(folder: Path, texts: Sequence[str]) -> int:
    """part-0.jsonl.zst, part-1.jsonl.zst; returns the bytes of text."""
    for number, part in enumerate(_halves(texts)):
        lines = (json.dumps({"id": f"{number}/{row}", "text": text}, ensure_ascii=False) for row, text in part)
        content = "".join(f"{line}\n" for line in lines).encode()
        (folder / f"part-{number}.jsonl.zst").write_bytes(zstandard.ZstdCompressor(level=3).compress(content))
    return sum(len(text.encode()) for text in texts)


def write_parquet(folder: Path, texts: Sequence[str]) -> int:
    for number, part in enumerate(_halves(texts)):
        table = pa.table({"id": [f"{number}/{row}" for row, _ in part], "text": [text for _, text in part]})
        pq.write_table(table, folder / f"part-{number}.parquet", compression="zstd", row_group_size=1000)
    return sum(len(text.encode()) for text in texts)


def write_warc(folder: Path, pages: Sequence[bytes]) -> int:
    """Response records, half of them in each of two files."""
    for number, part in enumerate(_halves(pages)):
        with (folder / f"part-{number}.warc.gz").open("wb") as file:
            for row, page in part:
                name = f"{number}/{row}"
                file.write(page_record(f"https://example.org/{name}", page, name))
    return sum(map(len, pages))


def _halves(values: Sequence) -> Iterator[list[tuple[int, object]]]:
    """Values 0, 2, 4 ... and 1, 3, 5 ..., numbered in each."""
    for number in range(NUM_FILES):
        yield list(enumerate(values[number::NUM_FILES]))
