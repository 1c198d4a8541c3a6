"""Quality of near-duplicate removal: planted pairs of known similarity, and real corpora.

Prints the share of planted pairs that meet in a band against 1 - (1 - s**rows)**bands, recall and precision of
removal against exact similarity computed in plain Python, and what LSH with union-find would have destroyed.
--figure FILE draws the curve with the measured points (docs/deduplication.md shows it)."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import zstandard
from datasketch import MinHashLSH
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support.planted import as_text, edited, edits_for, word_lists, write_parquet

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.minhash import band_keys, candidate_probability, shingles_of, signatures_of
from gristmill.data_pipeline.dedup.near import NearDedupConfig, near_duplicates
from gristmill.data_pipeline.dedup.near_copies import minhashes
from gristmill.data_pipeline.dedup.signatures import open_store
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
CORPORA = ("kubernetes_community", "rust_book", "rust_by_example", "tldr")
TARGETS = np.arange(0.30, 1.001, 0.05)
BINS = np.arange(0.275, 1.026, 0.05)
SHOWN = 3
FEWEST_PAIRS = 30  # of a bin that is shown: fewer say nothing about a share
CURVES = ((20, 6), (16, 8), (32, 4))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figure", type=Path, help="an .svg file for the curve with the measured points")
    options = parser.parse_args()
    texts = list(real_texts(options.data or SHARED / "corpora"))
    generator = np.random.default_rng(7)
    bases = [words for words in base_documents(texts, generator)][: 150 if options.quick else 800]
    points = {curve: measured_points(bases, *curve, generator) for curve in CURVES}
    print_points(points)
    if options.figure:
        draw(points, options.figure)
    figures = [*planted_figures(bases, generator), *labelled_figures(SHARED / "neardup")]
    print_figures([*figures, *destroyed(texts[: 3000 if options.quick else None])])


def real_texts(folder: Path) -> Iterator[str]:
    """The shared corpora, or every .jsonl.zst with a `text` of another folder; nothing if there is none."""
    names = [folder / f"{name}.jsonl.zst" for name in CORPORA]
    for path in [path for path in names if path.exists()] or sorted(folder.glob("*.jsonl.zst")):
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if text := json.loads(line).get("text"):
                    yield text


def base_documents(texts: list[str], generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Words of real documents of 200 words and more, cut at 1,500, near duplicates left out; then made ones."""
    seen: set[bytes] = set()
    for text in texts:
        words = fold_text(text).split()[:1500]
        shingles = set(shingles_of(" ".join(words), 5))
        if len(words) >= 200 and len(shingles & seen) < 0.05 * len(shingles):
            seen |= shingles
            yield np.array(words, dtype=object)
    yield from word_lists(generator, 800, 200, 1500)


def exact_jaccard(left: str, right: str) -> float:
    """Jaccard similarity in plain Python, independent of the measured code."""
    one, two = (set(shingles_of(fold_text(text), 5)) for text in (left, right))
    return len(one & two) / len(one | two)


def signed(texts: list[str], hashes: int) -> np.ndarray:
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    return signatures_of(np.frombuffer(b"".join(raw), np.uint8), offsets, 5, "word", hashes, 1)[0]


def measured_points(bases: list[np.ndarray], bands: int, rows: int, generator: np.random.Generator) -> list[tuple]:
    """(mean exact similarity, share of pairs found, expected share, pairs) by bins of similarity."""
    pairs = [(words, edited(words, generator, edits_for(s, len(words)))) for words in bases for s in TARGETS[::2]]
    left, right = ([" ".join(pair[side]) for pair in pairs] for side in (0, 1))
    exact = np.array([exact_jaccard(one, two) for one, two in zip(left, right, strict=True)])
    keys = [band_keys(signed(side, bands * rows), bands, rows, np.uint64(0)) for side in (left, right)]
    met = (keys[0] == keys[1]).any(axis=0)
    expected = np.array([candidate_probability(s, bands, rows) for s in exact])
    place = np.digitize(exact, BINS)
    chosen = [place == number for number in np.unique(place) if (place == number).sum() >= FEWEST_PAIRS]
    return [(exact[c].mean(), met[c].mean(), expected[c].mean(), int(c.sum())) for c in chosen]


def print_points(points: dict[tuple[int, int], list[tuple]]) -> None:
    table = Table("bands x rows", "similarity", "met", "expected", "standard errors off", "pairs")
    for (bands, rows), found in points.items():
        for similarity, met, expected, pairs in found:
            error = max(np.sqrt(expected * (1 - expected) / pairs), 1 / pairs)
            off = f"{(met - expected) / error:+.1f}"
            table.add_row(f"{bands} x {rows}", f"{similarity:.3f}", f"{met:.4f}", f"{expected:.4f}", off, str(pairs))
    Console(width=120).print(table)


def draw(points: dict[tuple[int, int], list[tuple]], path: Path) -> None:
    """SVG of the curves of `meeting_probability` and the measured points; deterministic."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt  # after `use`, as matplotlib asks

    matplotlib.rcParams["svg.hashsalt"] = "gristmill"
    figure, axes = plt.subplots(figsize=(7, 4))
    similarity = np.linspace(0.2, 1.0, 200)
    for (bands, rows), found in points.items():
        line = axes.plot(
            similarity, [candidate_probability(s, bands, rows) for s in similarity], label=f"{bands} x {rows}"
        )
        axes.plot(
            *zip(*[(s, met) for s, met, _, _ in found], strict=True), "o", color=line[0].get_color(), markersize=4
        )
    axes.axvline(0.8, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="Jaccard similarity of two documents", ylabel="probability of being compared")
    axes.legend(title="bands x rows")
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})


def deduplicated(texts: list[str], folder: Path) -> dict[str, tuple[str, float]]:
    """{removed: (kept, similarity)} with the defaults; ids are the texts' numbers in 32 hex digits."""
    parts = [DocumentFile(path, "s", 1) for path in write_parquet(folder / "documents", texts)]
    table = near_duplicates(parts, NearDedupConfig(), LocalEngine(1, Reporter.silent()), folder / "work")
    return {row["doc_id"]: (row["duplicate_of"], row["similarity"]) for row in table.to_pylist()}


def planted_figures(bases: list[np.ndarray], generator: np.random.Generator) -> list[Figure]:
    """A copy of each base: every one at the threshold or above must go, no other. Every other copy is of similarity
    0.3 to 1.0, and every other one close to the threshold, where the bands miss most."""
    texts: list[str] = []
    similarity = {}
    for number, words in enumerate(bases):
        wanted_similarity = generator.uniform(0.3, 1.0) if number % 2 else generator.uniform(0.78, 0.86)
        copy = edited(words, generator, edits_for(wanted_similarity, len(words)))
        similarity[f"{len(texts):032x}", f"{len(texts) + 1:032x}"] = exact_jaccard(" ".join(words), " ".join(copy))
        texts += [as_text(words), as_text(copy)]
    with tempfile.TemporaryDirectory() as folder:
        removed = deduplicated(texts, Path(folder))
    wanted = {frozenset(pair) for pair, s in similarity.items() if s >= 0.8}
    found = {frozenset((doc_id, kept)) for doc_id, (kept, _) in removed.items()}
    right = sum(exact_jaccard(texts[int(i, 16)], texts[int(k, 16)]) == s >= 0.8 for i, (k, s) in removed.items())
    return [
        Figure("near_dedup_recall", len(wanted & found) / len(wanted), f"of {len(wanted)} pairs", goal=0.99),
        Figure("near_dedup_precision", right / len(removed), f"of {len(removed)} removed", goal=1.0),
    ]


def labelled_figures(folder: Path) -> list[Figure]:
    """Recall and precision on the shared sets of articles with labelled near duplicates."""
    figures = []
    for path in sorted(folder.glob("*.truth")):
        lines = path.with_suffix(".train").read_text("utf-8", "replace").splitlines()
        names, texts = zip(*(line.split(" ", 1) for line in lines if " " in line), strict=True)
        truth = {frozenset(line.split()) for line in path.read_text().splitlines() if line.strip()}
        with tempfile.TemporaryDirectory() as work:
            removed = deduplicated(list(texts), Path(work))
        found = {frozenset((names[int(doc_id, 16)], names[int(kept, 16)])) for doc_id, (kept, _) in removed.items()}
        figures += [
            Figure(f"labelled_{path.stem}_found", len(found & truth), f"of {len(truth)} pairs", goal=len(truth)),
            Figure(f"labelled_{path.stem}_false", len(found - truth), "pairs"),
        ]
    return figures


def destroyed(texts: list[str]) -> list[Figure]:
    """Real documents that datasketch's LSH with union-find removes although they are less than 0.8 similar to the one
    document of their cluster that stays: with the bands it chooses itself for 0.8, and with ours."""
    if not texts:
        return []
    with tempfile.TemporaryDirectory() as folder:
        ours = deduplicated(texts, Path(folder))
        signed = dict(minhashes(open_store(Path(folder) / "work" / "signatures")))
    config = NearDedupConfig()
    print(f"of {len(texts)} real documents, {len(ours)} are removed")
    figures = []
    for figure, index in (
        ("destroyed_with_datasketch_bands", MinHashLSH(threshold=config.threshold, num_perm=config.scheme.hashes)),
        ("destroyed_with_our_bands", MinHashLSH(num_perm=config.scheme.hashes, params=(config.bands, config.rows))),
    ):
        theirs = removed_by_union_find(signed, index)
        wrong = [(i, k) for i, k in theirs.items() if exact_jaccard(texts[int(i, 16)], texts[int(k, 16)]) < 0.8]
        print(
            f"MinHashLSH ({index.b} x {index.r}) with union-find removes {len(theirs)}, {len(wrong)} of them falsely:"
        )
        for number, (doc_id, kept) in enumerate(wrong[:: max(len(wrong) // SHOWN, 1)][:SHOWN], 1):
            print(f"  {number}. removed: {' '.join(texts[int(doc_id, 16)].split())[:100]}")
            print(f"     kept:    {' '.join(texts[int(kept, 16)].split())[:100]}")
        figures.append(Figure(figure, len(wrong) / max(len(theirs), 1), f"of {len(theirs)} removed"))
    return figures


def removed_by_union_find(minhashes: dict, index: MinHashLSH) -> dict[str, str]:
    """{removed: kept} of MinHashLSH and connected components; the lowest id of a component stays."""
    parents = {doc_id: doc_id for doc_id in minhashes}

    def root(node: str) -> str:
        while parents[node] != node:
            node = parents[node]
        return node

    for doc_id, minhash in minhashes.items():
        if (minhash.hashvalues == 0xFFFFFFFF).all():
            continue
        for other in index.query(minhash):
            low, high = sorted((root(doc_id), root(other)))
            parents[high] = low
        index.insert(doc_id, minhash)
    return {doc_id: root(doc_id) for doc_id in parents if root(doc_id) != doc_id}


if __name__ == "__main__":
    main()
