"""Decontamination against the nine shared benchmarks: speed, recall by kind of edit, and false positives.

Questions of at least 8 words are planted in real documents: as they are, in capitals, with other punctuation or white
space, across line breaks, and edited: one word, or three, in a row or apart, substituted by words of other questions,
inserted or deleted at random places, in capitals and without punctuation half of the time. Questions of fewer words are
planted with one of their answers. The clean documents, with nothing planted, show the false positives, and so do
documents that share a phrase of 14 words which stands in ten of them, and those in which short questions stand without
their answers."""

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

from gristmill.data_pipeline.decontamination.config import (
    BenchmarkConfig,
    BenchmarkExample,
    DecontaminateConfig,
    read_benchmark,
)
from gristmill.data_pipeline.decontamination.decontaminate import decontaminate
from gristmill.data_pipeline.decontamination.edits import build_indexes, search_edits
from gristmill.data_pipeline.decontamination.ngram_index import search, words_of_bytes
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
FIELDS = {
    "lambada_openai": ("context",),
    "winograd_wsc": ("context_options",),
    "winogrande": ("context_options",),
    "copa": ("query", "choices"),
    "openbook_qa": ("query", "choices"),
    "piqa": ("query", "choices"),
    "boolq": ("query", "choices"),
    "arc_easy": ("query", "choices"),
    "arc_challenge": ("query", "choices"),
}
LONGEST, SHORTEST = 13, 8  # words of an n-gram; texts between the two are matched as a whole
GOALS = {1: 0.95, 3: 0.8}  # recall by the number of edited words


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
    """The whole step on one core, from Parquet to the report with reading and indexing the benchmarks; and the search
    alone."""
    num_bytes = sum(len(text.encode()) for text in texts)
    config = DecontaminateConfig(benchmarks=tuple(benchmarks))
    with tempfile.TemporaryDirectory() as folder:
        parts = [DocumentFile(path, "s", 1) for path in write_parquet(Path(folder) / "documents", texts)]
        works = iter(range(100))

        def whole() -> None:
            decontaminate(parts, config, LocalEngine(1, Reporter.silent()), Path(folder) / f"work{next(works)}")

        whole()
        seconds = statistics.median(cpu_seconds(whole) for _ in range(3))
    return [Figure("decontaminate", num_bytes / seconds / 1e6, "MB/s/core", goal=20), search_alone(benchmarks, texts)]


def search_alone(benchmarks: list[BenchmarkConfig], texts: list[str]) -> Figure:
    """Speed of the search alone; the peer looks up tuples of words in a set."""
    examples = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    config = DecontaminateConfig(benchmarks=tuple(benchmarks))
    indexes = build_indexes(examples, config)
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    data = np.frombuffer(b"".join(raw), np.uint8)

    def ours() -> None:
        words = words_of_bytes(data, offsets)
        search(indexes.ngrams, words)
        search_edits(indexes.edits, words, config.answer_window)

    wanted = plain_index(examples)
    sample = texts[::50]

    def in_plain_python() -> None:
        for text in sample:
            words = fold_text(text).split()
            for size in range(SHORTEST, LONGEST + 1):
                for i in range(len(words) - size + 1):
                    tuple(words[i : i + size]) in wanted  # noqa: B015 (the look-up is what is measured)

    own, other, ratio = in_turn(ours, in_plain_python, rounds=5)
    sampled = sum(len(text.encode()) for text in sample)
    rates = len(data) / own / 1e6, sampled / other / 1e6
    ratio *= len(data) / sampled
    return Figure("decontaminate_search", rates[0], "MB/s/core", rates[1], "plain Python", ratio)


def plain_index(examples: list[BenchmarkExample]) -> set[tuple[str, ...]]:
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
    }


def edited(text: str, edit: str, times: int, in_a_row: bool, others: list[str], generator: np.random.Generator) -> str:
    """The text with `times` words substituted, inserted or deleted, apart or in a row, at random places."""
    words = text.split()
    first = int(generator.integers(max(len(words) - times + 1, 1)))
    for number in range(times):
        at = first + number if in_a_row else int(generator.integers(len(words)))
        word = others[generator.integers(len(others))]
        if edit == "inserted":
            words.insert(at, word)
        else:
            words[min(at, len(words) - 1)] = word if edit == "substituted" else ""
    changed = " ".join(word for word in words if word)
    return changed.upper().replace(",", "").replace("?", "") if generator.random() < 0.5 else changed


def recall(benchmarks: list[BenchmarkConfig], texts: list[str], planted: int) -> list[Figure]:
    """Plants one question in each document, and counts the documents hit."""
    everything = [example for benchmark in benchmarks for example in read_benchmark(benchmark)]
    words = [len(fold_text(example.text).split()) for example in everything]
    questions = [e for e, count in zip(everything, words, strict=True) if count >= SHORTEST and not e.is_answer]
    generator = np.random.default_rng(5)
    config = DecontaminateConfig(benchmarks=tuple(benchmarks), policy="annotate")
    table = Table("kind", "planted", "found", "recall")
    figures = []
    for kind, (asked, goal) in planted_questions(questions, planted, generator).items():
        found = len(hits([f"{texts[n % len(texts)][:4000]}\n\n{text}\n\n" for n, text in enumerate(asked)], config))
        table.add_row(kind, str(len(asked)), str(found), f"{found / len(asked):.4f}")
        name = f"decontaminate_recall_{kind.replace(' ', '_')}"
        figures.append(Figure(name, found / len(asked), f"of {len(asked)} planted", goal=goal))
    asked, answered = short_questions(everything, words, config)
    for kind, held, is_asked in (("short with answer", answered, True), ("short without answer", asked, False)):
        found = len(hits([f"{texts[n % len(texts)][:4000]}\n\n{text}\n\n" for n, text in enumerate(held)], config))
        table.add_row(kind, str(len(held)), str(found), f"{found / len(held):.4f}")
        name = f"decontaminate_{'recall' if is_asked else 'hit'}_{kind.replace(' ', '_')}"
        figures.append(Figure(name, found / len(held), f"of {len(held)} planted", goal=1.0 if is_asked else None))
    Console(width=120).print(table)
    long = [e for e, count in zip(everything, words, strict=True) if count > 30]
    return [*figures, *false_positives(texts, config, long)]


def planted_questions(
    questions: list[BenchmarkExample], planted: int, generator: np.random.Generator
) -> dict[str, tuple[list[str], float]]:
    """{kind of edit: (questions to plant, required recall)}."""
    found: dict[str, tuple[list[str], float]] = {}
    chosen = [questions[n].text for n in generator.permutation(len(questions))[:planted]]
    for number, text in enumerate(chosen):
        kind, changed = list(disguises(text).items())[number % 5]
        found.setdefault(kind, ([], 1.0))[0].append(changed)
    others = " ".join(chosen).split()
    for edit in ("substituted", "inserted", "deleted"):
        for times, in_a_row in ((1, False), (3, False), (3, True)):
            mine = [questions[n].text for n in generator.permutation(len(questions))[: planted // 5]]
            kind = f"{('one', '', 'three')[times - 1]} {edit}{' in a row' if in_a_row else ''}"
            found[kind] = [edited(text, edit, times, in_a_row, others, generator) for text in mine], GOALS[times]
    return found


def short_questions(
    examples: list[BenchmarkExample], words: list[int], config: DecontaminateConfig
) -> tuple[list[str], list[str]]:
    """The questions of fewer than 8 words that are searched for, alone and with one of their answers."""
    index = build_indexes(examples, config).edits
    asked, answered = [], []
    for number in np.flatnonzero(index.short):
        first, last = index.texts.answer_first[number : number + 2]
        answer = examples[index.texts.answers[first + number % (last - first)]].text
        asked.append(examples[number].text)
        answered.append(f"{examples[number].text}\nAnswer: {answer}" if words[number] > 2 else f"{asked[-1]} {answer}")
    return asked, answered


def false_positives(texts: list[str], config: DecontaminateConfig, examples: list[BenchmarkExample]) -> list[Figure]:
    """False positives: documents without any question, and ten that share a common phrase of 14 words with a
    benchmark."""
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
        parts = [DocumentFile(path, "s", 1) for path in write_parquet(Path(folder) / "documents", documents)]
        engine = LocalEngine(1, Reporter.silent())
        result = decontaminate(parts, config, engine, Path(folder) / "work")
        for row in result.matches.to_pylist()[:3] if len(result.hits) < 20 else []:
            print(f"hit: {row['benchmark']} {row['example']}: {' '.join(row['excerpt'].split())[:200]}")
        return {int(doc_id, 16) for doc_id in result.hits.column("doc_id").to_pylist()}


if __name__ == "__main__":
    main()
