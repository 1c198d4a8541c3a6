"""Quality models against the packages they stand in for, on the text of the shared books and pages.

quality_score: MB of text a second and core by a fastText model, of ours and of fasttext-predict in turn; the scores are
compared (quality_score_difference). The model is written here with random vectors: 100 dimensions, the 50,000 most
frequent words and 500,000 buckets of word bigrams, two labels, softmax; speed depends on its shape.

quality_language_model: the same of our n-gram model. quality_linear: the same of our linear model and of a linear model
on scikit-learn's hashed bigrams. quality_linear_auc: articles against other kinds of pages (WCXB), by the texts alone,
mean of five folds, with scikit-learn's defaults."""

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
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from gristmill.data_pipeline.quality.linear_model import FitSettings, LinearModel, fit_linear_model
from gristmill.data_pipeline.quality.ngram_lm import fit_ngram_model
from gristmill.data_pipeline.quality.scores import QualityScoreConfig, locked_scores, score_columns
from gristmill.data_pipeline.signals.bits import TextBuffer

WIDTH, WORDS, BUCKETS, LABELS = 100, 50_000, 500_000, ("__label__cc", "__label__hq")
TURNS, FOLDS = 3, 5
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


def fasttext_figures(lines: list[str]) -> list[Figure]:
    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "model.bin", lines)
        models = locked_scores({"hq": QualityScoreConfig(model=str(path), label="hq")})
        package = fasttext.load_model(str(path))
        buffer = TextBuffer.of(lines)
        score_columns(TextBuffer.of(lines[:1]), models)  # compiles, and reads the model
        seconds: dict[str, list[float]] = {"ours": [], "package": []}
        for _ in range(TURNS):
            started = time.process_time()
            (ours,) = score_columns(buffer, models)
            seconds["ours"].append(time.process_time() - started)
            started = time.process_time()
            answers = [package.f.predict(line + "\n", -1, 0.0, "strict") for line in lines]
            seconds["package"].append(time.process_time() - started)
    expected = np.array([next((score for score, label in answer if label == LABELS[1]), 0.0) for answer in answers])
    difference = float(np.abs(ours.to_numpy() - expected).max())
    fastest, peer = min(seconds["ours"]), min(seconds["package"])
    speed = Figure(
        "quality_score", megabytes / fastest, "MB/s", megabytes / peer, "fasttext-predict", ratio=peer / fastest, goal=5
    )
    return [speed, Figure("quality_score_difference", difference, "largest difference of a score")]


def linear_figures(lines: list[str]) -> list[Figure]:
    """Speed does not depend on the weights, so they are random."""
    megabytes = sum(len(line.encode()) for line in lines) / 1e6
    model = LinearModel(np.random.default_rng(1).normal(size=2**18).astype(np.float32), 2, 1.0, 0.0)
    vectorizer, buffer = hashed_bigrams(), TextBuffer.of(lines)
    model.scores(TextBuffer.of(lines[:1]))  # compiles
    seconds: dict[str, list[float]] = {"ours": [], "package": []}
    for _ in range(TURNS):
        started = time.process_time()
        model.scores(buffer)
        seconds["ours"].append(time.process_time() - started)
        started = time.process_time()
        vectorizer.transform(lines) @ model.weights
        seconds["package"].append(time.process_time() - started)
    fastest, peer = min(seconds["ours"]), min(seconds["package"])
    speed = megabytes / fastest
    return [
        Figure("quality_linear", speed, "MB/s", megabytes / peer, "scikit-learn", ratio=peer / fastest),
        Figure("quality_linear_speed", speed, "MB/s", goal=100),
    ]


def language_model_figure(lines: list[str]) -> Figure:
    """A model of the first tenth of the lines scores all."""
    model, buffer = fit_ngram_model(lines[: max(len(lines) // 10, 1)], 3), TextBuffer.of(lines)
    model.scores(TextBuffer.of(lines[:1]))  # compiles
    seconds = []
    for _ in range(TURNS):
        started = time.process_time()
        model.scores(buffer)
        seconds.append(time.process_time() - started)
    return Figure("quality_language_model", sum(len(line.encode()) for line in lines) / 1e6 / min(seconds), "MB/s")


def hashed_bigrams() -> HashingVectorizer:
    return HashingVectorizer(n_features=2**18, ngram_range=(1, 2), alternate_sign=False)


def accuracy_figure(data: Path) -> Figure:
    pages = list(records(data / "html/wcxb_dev/pages.jsonl.zst"))
    pages = [page for page in pages if page["main_content"]]
    content = [page["main_content"] for page in pages]
    is_article = np.array([page["page_type"] == "article" for page in pages])
    table, ours, package = hashed_bigrams().transform(content), [], []
    for fold in range(FOLDS):
        held_out = np.arange(len(content)) % FOLDS == fold
        articles, others = (
            [content[k] for k in np.flatnonzero(~held_out & (is_article == side))] for side in (True, False)
        )
        model = fit_linear_model(articles, others, FitSettings())
        scores = model.scores(TextBuffer.of([content[k] for k in np.flatnonzero(held_out)]))
        ours.append(roc_auc_score(is_article[held_out], np.nan_to_num(scores)))
        peer = LogisticRegression(max_iter=200, class_weight="balanced").fit(table[~held_out], is_article[~held_out])
        package.append(roc_auc_score(is_article[held_out], peer.decision_function(table[held_out])))
    return Figure("quality_linear_auc", np.mean(ours), "AUC", np.mean(package), "scikit-learn")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    data = Path(options.data or os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent / "../../shared/data")
    lines = texts(data, 4_000_000 if options.quick else 20_000_000)
    print_figures(
        [*fasttext_figures(lines), *linear_figures(lines), language_model_figure(lines), accuracy_figure(data)]
    )


if __name__ == "__main__":
    main()
