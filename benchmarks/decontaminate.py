"""Decontamination against the nine shared benchmarks: speed, recall by kind of disguise, and false positives.

Benchmark texts are planted in real documents: as they are, in capitals, with other punctuation, with other white
space, across line breaks, and with one word in the middle changed (of which texts of fewer than 27 words can hold no
whole 13-gram). The clean documents, with nothing planted, show the false positives."""

import os
import tempfile
from pathlib import Path

import numpy as np
from measure import Figure, arguments, in_turn, print_figures
from near_dedup_quality import real_texts
from rich.console import Console
from rich.table import Table
from support.planted import corpus, write_parquet

from gristmill.data_pipeline.decontamination.benchmark import BenchmarkConfig, Example, read_benchmark
from gristmill.data_pipeline.decontamination.decontaminate import DecontaminateConfig, decontaminate
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
SHORTEST = 13  # words of a planted text: shorter ones are matched as a whole or not at all, and are reported apart


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
    texts = texts[: 2000 if options.quick else None]
    print_figures([speed(benchmarks, texts), *recall(benchmarks, texts, 500 if options.quick else 4000)])


def speed(benchmarks: list[BenchmarkConfig], texts: list[str]) -> Figure:
    """The search alone, and beside it in plain Python: a set of word tuples."""
    examples = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    index = build_index(examples, 13, 8)
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    data = np.frombuffer(b"".join(raw), np.uint8)
    wanted = plain_index(examples)
    sample = texts[::50]

    def in_plain_python() -> None:
        for text in sample:
            words = fold_text(text).split()
            for size in range(8, 14):
                for i in range(len(words) - size + 1):
                    tuple(words[i : i + size]) in wanted  # noqa: B015 (the look-up is what is measured)

    own, other, ratio = in_turn(lambda: search(index, data, offsets), in_plain_python, rounds=5)
    sampled = sum(len(text.encode()) for text in sample)
    scale = len(data) / sampled
    return Figure(
        "decontaminate", len(data) / own / 1e6, "MB/s/core", sampled / other / 1e6, "plain Python", ratio * scale, 20
    )


def plain_index(examples: list[Example]) -> set[tuple[str, ...]]:
    found = set()
    for example in examples:
        words = fold_text(example.text).split()
        size = min(len(words), 13)
        if size >= 8:
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
    examples = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    examples = [example for example in examples if len(fold_text(example.text).split()) >= SHORTEST]
    generator = np.random.default_rng(5)
    chosen = generator.permutation(len(examples))[:planted]
    kinds, documents = [], []
    for number, choice in enumerate(chosen):
        host = texts[number % len(texts)][:4000]
        kind, text = list(disguises(examples[choice].text).items())[number % 6]
        kinds.append(kind)
        documents.append(f"{host}\n\n{text}\n\n{host}")
    config = DecontaminateConfig(benchmarks=tuple(benchmarks), policy="annotate")
    hit = hits(documents, config)
    clean = hits(texts, config)
    table = Table("kind", "planted", "found", "recall")
    for kind in dict.fromkeys(kinds):
        mine = [number for number, other in enumerate(kinds) if other == kind]
        found = len(hit & set(mine))
        table.add_row(kind, str(len(mine)), str(found), f"{found / len(mine):.4f}")
    Console(width=120).print(table)
    whole = [number for number, kind in enumerate(kinds) if kind != "one word edited"]
    print(f"clean documents: {len(clean)} of {len(texts)} are hit")
    share = len(hit & set(whole)) / len(whole)
    return [
        Figure("decontaminate_recall_unedited", share, f"of {len(whole)} planted", goal=1.0),
        Figure("decontaminate_clean_documents_hit", len(clean) / len(texts), f"of {len(texts)}"),
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
