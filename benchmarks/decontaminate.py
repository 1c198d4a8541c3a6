"""Decontamination against the nine shared benchmarks: speed, recall by kind of disguise, and false positives.

Benchmark texts are planted in real documents: as they are, in capitals, with other punctuation, with other white
space, across line breaks, and with one word in the middle changed (of which texts of fewer than 27 words can hold no
whole 13-gram: those that still hold one are counted apart). The clean documents, with nothing planted, show the false
positives, and so do documents that share a phrase of 14 words which stands in ten of them."""

import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
from measure import Figure, arguments, cpu_seconds, in_turn, print_figures
from near_dedup_quality import real_texts
from rich.console import Console
from rich.table import Table
from support.planted import corpus, write_parquet

from gristmill.data_pipeline.decontamination.benchmark import Example, read_benchmark
from gristmill.data_pipeline.decontamination.config import BenchmarkConfig, DecontaminateConfig
from gristmill.data_pipeline.decontamination.decontaminate import decontaminate
from gristmill.data_pipeline.decontamination.index import build_index, search
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.part import Part
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.engine.progress import Reporter

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
FIELDS = {
    "lambada_openai": ("context",),
    "winograd_wsc": ("context_options",),
    "winogrande": ("context_options",),
    "copa": ("query",),
    "openbook_qa": ("query",),
    "piqa": ("query",),
    "boolq": ("query",),
    "arc_easy": ("query",),
    "arc_challenge": ("query",),
}
LONGEST, SHORTEST = 13, 8  # words of an n-gram; texts between the two are matched as a whole, and reported apart


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    folder = SHARED / "benchmarks"
    if not folder.exists():
        print(f"{folder} is absent; set GRISTMILL_SHARED_DATA to the shared data folder")
        return
    benchmarks = [
        BenchmarkConfig(name=name, paths=(folder / f"{name}.jsonl.zst",), fields=fields)
        for name, fields in FIELDS.items()
    ]
    texts = list(real_texts(options.data or SHARED / "corpora")) or list(corpus(1, 2000))
    figures = speed(benchmarks, texts)
    texts = texts[: 2000 if options.quick else None]
    print_figures([*figures, *recall(benchmarks, texts, 600 if options.quick else 4000)])


def speed(benchmarks: list[BenchmarkConfig], texts: list[str]) -> list[Figure]:
    """The whole step on one core, from Parquet to the report, benchmarks read and indexed; and the search alone."""
    num_bytes = sum(len(text.encode()) for text in texts)
    config = DecontaminateConfig(benchmarks=tuple(benchmarks))
    with tempfile.TemporaryDirectory() as folder:
        parts = [Part(path, "s", 1) for path in write_parquet(Path(folder) / "documents", texts)]
        works = iter(range(100))

        def whole() -> None:
            decontaminate(parts, config, LocalEngine(1, Reporter.silent()), Path(folder) / f"work{next(works)}")

        whole()
        seconds = statistics.median(cpu_seconds(whole) for _ in range(3))
    return [Figure("decontaminate", num_bytes / seconds / 1e6, "MB/s/core", goal=20), search_alone(benchmarks, texts)]


def search_alone(benchmarks: list[BenchmarkConfig], texts: list[str]) -> Figure:
    """The peer is a set of word tuples."""
    examples = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    index = build_index(examples, LONGEST, SHORTEST)
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    data = np.frombuffer(b"".join(raw), np.uint8)
    wanted = plain_index(examples)
    sample = texts[::50]

    def in_plain_python() -> None:
        for text in sample:
            words = fold_text(text).split()
            for size in range(SHORTEST, LONGEST + 1):
                for i in range(len(words) - size + 1):
                    tuple(words[i : i + size]) in wanted  # noqa: B015 (the look-up is what is measured)

    own, other, ratio = in_turn(lambda: search(index, data, offsets), in_plain_python, rounds=5)
    sampled = sum(len(text.encode()) for text in sample)
    rates = len(data) / own / 1e6, sampled / other / 1e6
    ratio *= len(data) / sampled
    return Figure("decontaminate_search", rates[0], "MB/s/core", rates[1], "plain Python", ratio)


def plain_index(examples: list[Example]) -> set[tuple[str, ...]]:
    found = set()
    for example in examples:
        words = fold_text(example.text).split()
        size = min(len(words), LONGEST)
        if size >= SHORTEST:
            found |= {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
    return found


def disguises(text: str) -> dict[str, str]:
    words = text.split()
    middle = len(words) // 2
    return {
        "verbatim": text,
        "case": text.upper(),
        "punctuation": "; ".join(words),
        "white space": " \t ".join(words),
        "line break": "\n".join([" ".join(words[:middle]), " ".join(words[middle:])]),
        "one word edited": " ".join([*words[:middle], "somethingelse", *words[middle + 1 :]]),
    }


def recall(benchmarks: list[BenchmarkConfig], texts: list[str], planted: int) -> list[Figure]:
    """Plants one text in each document in turn of kinds, and counts the documents hit."""
    everything = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    words = [len(fold_text(example.text).split()) for example in everything]
    examples = [example for example, count in zip(everything, words, strict=True) if count >= LONGEST]
    short = [e for e, count in zip(everything, words, strict=True) if SHORTEST <= count < LONGEST][: planted // 6]
    wanted = plain_index(examples)
    generator = np.random.default_rng(5)
    chosen = generator.permutation(len(examples))[:planted]
    kinds, documents, whole = [], [], []
    for number, choice in enumerate(chosen):
        host = texts[number % len(texts)][:4000]
        kind, text = list(disguises(examples[choice].text).items())[number % 6]
        kinds.append(kind)
        whole.append(holds_ngram(text, wanted))
        documents.append(f"{host}\n\n{text}\n\n{host}")
    config = DecontaminateConfig(benchmarks=tuple(benchmarks), policy="annotate")
    hit = hits(documents, config)
    table = Table("kind", "planted", "found", "recall", "of those with a whole n-gram")
    figures = []
    for kind in dict.fromkeys(kinds):
        mine = {number for number, other in enumerate(kinds) if other == kind}
        left = {number for number in mine if whole[number]}
        share, of_left = len(hit & mine) / len(mine), len(hit & left) / len(left)
        table.add_row(kind, str(len(mine)), str(len(hit & mine)), f"{share:.4f}", f"{of_left:.4f} of {len(left)}")
        name = f"decontaminate_recall_{kind.replace(' ', '_')}"
        goal = None if kind == "one word edited" else 1.0
        figures.append(Figure(name, share, f"of {len(mine)} planted", goal=goal))
    found = hits([f"{texts[n % len(texts)][:4000]}\n\n{e.text.upper()}\n\n" for n, e in enumerate(short)], config)
    figures.append(
        Figure("decontaminate_recall_8_to_12_words", len(found) / len(short), f"of {len(short)} planted", goal=1.0)
    )
    table.add_row("8 to 12 words, case", str(len(short)), str(len(found)), f"{len(found) / len(short):.4f}", "")
    Console(width=120).print(table)
    return [*figures, *false_positives(texts, config, examples)]


def holds_ngram(text: str, wanted: set[tuple[str, ...]]) -> bool:
    words = fold_text(text).split()
    return any(tuple(words[i : i + LONGEST]) in wanted for i in range(len(words) - LONGEST + 1))


def false_positives(texts: list[str], config: DecontaminateConfig, examples: list[Example]) -> list[Figure]:
    """Documents with nothing planted, and ten that share 14 words of a benchmark text, which are then a phrase."""
    clean = hits(texts, config)
    text = next(example.text for example in examples if len(fold_text(example.text).split()) > 30)
    phrase = " ".join(fold_text(text).split()[:14])
    sharing = hits([f"{host[:2000]}\n{phrase}\n{host[2000:4000]}" for host in texts[:10]], config)
    print(f"clean documents: {len(clean)} of {len(texts)} are hit; of 10 that share a common phrase: {len(sharing)}")
    return [
        Figure("decontaminate_clean_documents_hit", len(clean) / len(texts), f"of {len(texts)}"),
        Figure("decontaminate_common_phrase_hit", len(sharing) / 10, "of 10"),
    ]


def hits(documents: list[str], config: DecontaminateConfig) -> set[int]:
    with tempfile.TemporaryDirectory() as folder:
        parts = [Part(path, "s", 1) for path in write_parquet(Path(folder) / "documents", documents)]
        engine = LocalEngine(1, Reporter.silent())
        result = decontaminate(parts, config, engine, Path(folder) / "work")
        for row in result.matches.to_pylist()[:3] if len(result.hits) < 20 else []:
            print(f"hit: {row['benchmark']} {row['example']}: {' '.join(row['excerpt'].split())[:200]}")
        return {int(doc_id, 16) for doc_id in result.hits.column("doc_id").to_pylist()}


if __name__ == "__main__":
    main()
