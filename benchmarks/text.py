"""Text for benchmarks: a given folder, the shared corpora, or seeded synthetic text."""

import io
import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import zstandard

ROOT = Path(__file__).parent.parent


def documents(folder: Path | None, num_bytes: int) -> list[str]:
    """Documents of about num_bytes of UTF-8 in all, shuffled with a fixed seed; synthetic ones if there are none.

    A folder holds .txt, .md or .jsonl(.zst) files with a field `text`."""
    shared = Path(os.environ.get("GRISTMILL_SHARED_DATA") or ROOT / "../shared/data") / "corpora"
    found = list(_read(folder or shared)) if (folder or shared).is_dir() else []
    found = found or list(made(num_bytes))
    random.Random(0).shuffle(found)
    taken, held = [], 0
    for text in found:
        if held >= num_bytes:
            break
        taken.append(text)
        held += len(text.encode())
    return taken


def made(num_bytes: int) -> Iterator[str]:
    """Synthetic text: words of a Zipf-distributed vocabulary in sentences and paragraphs."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(1, 9))) for _ in range(30_000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))
    written = 0
    while written < num_bytes:
        sentences = (
            " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(4, 20))).capitalize() for _ in range(60)
        )
        text = ".\n".join(sentences) + "."
        written += len(text)
        yield text


def _read(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".md"):
            yield path.read_text("utf-8")
        elif path.name.endswith((".jsonl", ".jsonl.zst")):
            yield from _texts(path)


def _texts(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        stream = zstandard.ZstdDecompressor().stream_reader(raw) if path.suffix == ".zst" else raw
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            text = json.loads(line).get("text")
            if text:
                yield text
