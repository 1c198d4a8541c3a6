"""Peak memory of one worker that reads and annotates records of every kind. As a program:
FOLDER {"LIMIT": [KIND, ...], ...}

Prints {LIMIT: {KIND: bytes}}: what the peak was above the memory of a process that has only loaded its libraries and
compiled its kernels. Each kind runs in a fork, because a process's peak never falls."""

import bz2
import gzip
import json
import lzma
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, annotate_all, annotation_tasks
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig
from gristmill.data_pipeline.readers.document import BATCH_BYTES
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

WORDS = "the mill stands by the river "
PAGE = "<html><head><title>Mill</title></head><body>"
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"
ZEROS = 1 << 20


class _Stored:
    """The interface of a compressor, without compression."""

    def compress(self, raw: bytes) -> bytes:
        return raw

    def flush(self) -> bytes:
        return b""


class _Lz4:
    def compress(self, raw: bytes) -> bytes:
        held = pa.BufferOutputStream()
        with pa.CompressedOutputStream(held, "lz4") as file:
            file.write(raw)
        return held.getvalue().to_pybytes()

    def flush(self) -> bytes:
        return b""


class _Gzip(_Stored):
    def compress(self, raw: bytes) -> bytes:
        return gzip.compress(raw, 1)


COMPRESSORS: dict[str, Callable[[], Any]] = {
    "": _Stored,
    ".gz": _Gzip,
    ".zst": zstandard.ZstdCompressor(1).compressobj,
    ".bz2": lambda: bz2.BZ2Compressor(1),
    ".xz": lambda: lzma.LZMACompressor(preset=0),
    ".lz4": _Lz4,
}


def full(pattern: str, num_bytes: int) -> str:
    """The pattern again and again, in at most num_bytes of UTF-8."""
    return pattern * (num_bytes // len(pattern.encode()))


def many(record: bytes, limit: int) -> Iterator[bytes]:
    """As many equal records as a batch takes, and two more, one at a time."""
    for _ in range(BATCH_BYTES // limit + 3):
        yield record


def lines(text: str, limit: int) -> Iterator[bytes]:
    yield from many(b'{"text": "' + full(text, limit - 100).encode() + b'"}\n', limit)


def lines_and_bomb(limit: int) -> Iterator[bytes]:
    """One line of 40 times the limit, in a file that compresses it to little."""
    yield from lines(WORDS, limit)
    yield b'{"text": "'
    for _ in range(40 * limit // ZEROS + 1):
        yield bytes(ZEROS)
    yield b'"}\n{"text": "last"}\n'


def metadata(item: str, limit: int) -> Iterator[bytes]:
    values = ",".join([item] * ((limit - 100) // (len(item) + 1)))
    line = b'{"text": "short", "tags": [' + values.encode() + b"]}\n"
    for _ in range(4):  # more than a batch: only the bound on its characters keeps them out
        yield from many(line, limit)


def urls(limit: int) -> Iterator[bytes]:
    line = b'{"text": "short", "url": "http://' + full("a.", limit - 100).encode() + b'"}\n'
    for _ in range(4):
        yield from many(line, limit)


def page(limit: int) -> bytes:
    return (PAGE + full(f"<p>{WORDS * 3}</p>\n", limit - 1000)).encode()


def html_lines(limit: int) -> Iterator[bytes]:
    yield from many(json.dumps({"html": page(limit * 9 // 10).decode()}).encode() + b"\n", limit)


def warc(limit: int, kind: str, content: bytes) -> Iterator[bytes]:
    media = "application/http; msgtype=response" if kind == "response" else "text/plain"
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n"
    yield from many(head.encode() + content + b"\r\n\r\n", limit)


def arc(limit: int) -> Iterator[bytes]:
    content = HTTP + b"\r\n" + page(limit)
    yield from many(b"http://a.b/ 1.2.3.4 20140216050221 text/html %d\n" % len(content) + content + b"\n", limit)


def pieces(limit: int, between: bytes) -> Iterator[bytes]:
    yield from many(full(WORDS, limit - 100).encode() + between, limit)


def code(limit: int) -> Iterator[bytes]:
    yield ('"""A module of a mill."""\n' + full(f"# {WORDS}\nx = (1, [2])\n", limit - 100)).encode()


RECORDS: dict[str, tuple[str, str, Callable[[int], Iterator[bytes]], dict[str, Any]]] = {
    # kind -> format, file name, content for a limit, settings of the source
    **{f"jsonl{end}": ("jsonl", f"a.jsonl{end}", lines_and_bomb, {}) for end in COMPRESSORS},
    "jsonl of Chinese": ("jsonl", "a.jsonl", lambda limit: lines("磨坊在河边。", limit), {}),
    "jsonl of emoji": ("jsonl", "a.jsonl", lambda limit: lines("🌾", limit), {}),
    "jsonl with one emoji": ("jsonl", "a.jsonl", lambda limit: lines(WORDS * 1000 + "🌾", limit), {}),
    "jsonl of escapes": ("jsonl", "a.jsonl", lambda limit: lines("\\u78e8", limit), {}),
    "jsonl of letters": ("jsonl", "a.jsonl", lambda limit: lines("a ", limit), {}),
    "jsonl of line ends": ("jsonl", "a.jsonl", lambda limit: lines("a\\n", limit), {}),
    "strings.gz": ("jsonl", "a.jsonl.gz", lambda limit: metadata('"the mill stands"', limit), {}),
    "objects.gz": ("jsonl", "a.jsonl.gz", lambda limit: metadata('{"a":1}', limit), {}),
    "lists.gz": ("jsonl", "a.jsonl.gz", lambda limit: metadata("[]", limit), {}),
    "URLs.gz": ("jsonl", "a.jsonl.gz", urls, {}),
    "jsonl of HTML": ("jsonl", "a.jsonl", html_lines, {"html_field": "html"}),
    "text": ("text", "a.txt", lambda limit: iter([full(WORDS, limit).encode()]), {}),
    "text by paragraph": ("text", "a.txt", lambda limit: pieces(limit, b"\n\n"), {"record": "paragraph"}),
    "text by line": ("text", "a.txt", lambda limit: pieces(limit, b"\n"), {"record": "line"}),
    "text in UTF-16": ("text", "a.txt", lambda limit: utf16(pieces(limit, b"\n")), {"record": "line"}),
    "markdown": ("markdown", "a.md", lambda limit: iter([full(f"# {WORDS}\n\n", limit).encode()]), {}),
    "html": ("html", "a.html", lambda limit: iter([page(limit)]), {}),
    "html, trafilatura": ("html", "a.html", lambda limit: iter([page(limit)]), {"extractor": "trafilatura"}),
    "html, resiliparse": ("html", "a.html", lambda limit: iter([page(limit)]), {"extractor": "resiliparse"}),
    "warc": ("warc", "a.warc", lambda limit: warc(limit, "response", HTTP + b"\r\n" + page(limit)), {}),
    "warc of gzip": ("warc", "a.warc", lambda limit: warc(limit, "response", packed_page(limit)), {}),
    "wet": ("wet", "a.wet", lambda limit: warc(limit, "conversion", full(WORDS, limit - 1000).encode()), {}),
    "arc": ("arc", "a.arc", arc, {}),
    "parquet": ("parquet", "a.parquet", lambda limit: lines(WORDS, limit), {}),
}


def utf16(content: Iterator[bytes]) -> Iterator[bytes]:
    yield b"\xff\xfe"
    for one in content:
        yield one.decode().encode("utf-16-le")


def packed_page(limit: int) -> bytes:
    return HTTP + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(page(limit))


def write(folder: Path, kind: str, limit: int) -> SourceConfig:
    """Writes the file of records of the limit, and returns the source that reads it."""
    name, path, content, settings = RECORDS[kind]
    folder.mkdir(parents=True)
    if name == "parquet":
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(folder / path, schema, use_dictionary=False) as file:
            file.write_table(pa.table({"text": [json.loads(line)["text"] for line in content(limit)]}, schema))
    else:
        compressor = COMPRESSORS.get(Path(path).suffix, _Stored)()
        with (folder / path).open("wb") as file:
            for piece in content(limit):
                file.write(compressor.compress(piece))
            file.write(compressor.flush())
    return SourceConfig(name="s", format=name, paths=(str(folder / path),), max_record_bytes=limit, **settings)


def annotate(source: SourceConfig, cache: Path) -> None:
    engine = LocalEngine(1, Reporter.silent())
    config = AnnotateConfig(normalize=NormalizeConfig(), word_tokenizer="unicode", language_id=None, edits=())
    [locked] = resolve([source], engine)
    [tasks] = annotation_tasks([(source, locked, config)], cache, engine)
    annotate_all(tasks, engine)


def growth(source: SourceConfig, cache: Path) -> int:
    """Bytes that the peak of annotating the source is above what this process holds now, measured in a fork."""
    reader, writer = os.pipe()
    if not os.fork():
        before = psutil.Process().memory_info().rss
        annotate(source, cache)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(writer, str(peak - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.wait()
    return int(said)


def main() -> None:
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    for kind in ("jsonl", "html", "html, trafilatura", "html, resiliparse", "parquet"):  # loads what they load
        annotate(write(folder / "first" / kind, kind, 20_000), folder / "cache")
    found = {
        limit: {
            kind: growth(write(folder / limit / kind, kind, int(limit)), folder / f"cache{limit}") for kind in kinds
        }
        for limit, kinds in wanted.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
