"""Quality scores by a fastText model against the fastText package, on the text of the shared books.

The model is written here with random vectors: 100 dimensions, the 50,000 most frequent words and 500,000 buckets of
word bigrams, two labels, softmax; speed depends on its shape. quality_score: MB of text a second and core, of ours and
of fasttext-predict in turn; the scores are compared."""

import html
import os
import re
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path

import fasttext
import numpy as np
from language_profiles import records
from measure import Figure, arguments, print_figures

from gristmill.data_pipeline.quality.scores import QualityScoreConfig, pinned_scores, score_columns
from gristmill.data_pipeline.signals.bits import TextBuffer

WIDTH, WORDS, BUCKETS, LABELS = 100, 50_000, 500_000, ("__label__cc", "__label__hq")
TURNS = 3
SOFTMAX, SUPERVISED = 3, 3


def texts(data: Path, limit: int) -> list[str]:
    """The books' files as text, on one line each, up to so many bytes."""
    lines, size = [], 0
    for record in records(data / "corpora/books_xhtml.jsonl.zst"):
        line = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", record["html"])).split())
        lines.append(line)
        size += len(line.encode())
        if size > limit:
            break
    return lines


def write_model(path: Path, lines: list[str]) -> Path:
    """A .bin in fastText's format (args.cc, dictionary.cc, densematrix.cc)."""
    counts = Counter(word for line in lines for word in line.split())
    entries = [("</s>", 0), *((word, 0) for word, _ in counts.most_common(WORDS)), *((label, 1) for label in LABELS)]
    num_words = len(entries) - len(LABELS)
    rng = np.random.default_rng(1)
    with path.open("wb") as file:
        file.write(
            struct.pack("<ii12id", 793712314, 12, WIDTH, 5, 5, 1, 5, 2, SOFTMAX, SUPERVISED, BUCKETS, 0, 0, 100, 1e-4)
        )
        file.write(struct.pack("<3iqq", len(entries), num_words, len(LABELS), len(entries), -1))
        for place, (text, kind) in enumerate(entries):
            file.write(text.encode() + b"\0" + struct.pack("<qb", max(1, 10**6 - place), kind))
        for shape in ((num_words + BUCKETS, WIDTH), (len(LABELS), WIDTH)):
            file.write(b"\0" + struct.pack("<qq", *shape) + rng.normal(size=shape).astype(np.float32).tobytes())
    return path


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    data = Path(options.data or os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent / "../../shared/data")
    lines = texts(data, 4_000_000 if options.quick else 20_000_000)
    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "model.bin", lines)
        pinned = pinned_scores({"hq": QualityScoreConfig(model=str(path), label="hq")})
        package = fasttext.load_model(str(path))
        buffer = TextBuffer.of(lines)
        score_columns(TextBuffer.of(lines[:1]), pinned)  # compiles, and reads the model
        seconds: dict[str, list[float]] = {"ours": [], "package": []}
        for _ in range(TURNS):
            started = time.process_time()
            (ours,) = score_columns(buffer, pinned)
            seconds["ours"].append(time.process_time() - started)
            started = time.process_time()
            answers = [package.f.predict(line + "\n", -1, 0.0, "strict") for line in lines]
            seconds["package"].append(time.process_time() - started)
    theirs = np.array([next((score for score, label in answer if label == LABELS[1]), 0.0) for answer in answers])
    difference = float(np.abs(ours.to_numpy() - theirs).max())
    fastest, peer = min(seconds["ours"]), min(seconds["package"])
    print_figures(
        [
            Figure(
                "quality_score",
                megabytes / fastest,
                "MB/s",
                megabytes / peer,
                "fasttext-predict",
                ratio=peer / fastest,
                goal=5,
            ),
            Figure("quality_score_difference", difference, "largest difference of a score"),
        ]
    )


if __name__ == "__main__":
    main()
