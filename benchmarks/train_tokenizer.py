"""Speed and memory of training a tokenizer on text in Parquet, compared with tokenizers and sentencepiece.

`train_bpe`: a byte-level BPE as the stage `tokenizer` trains it, against tokenizers' BpeTrainer with the same pattern.
`train_unigram`: a unigram model against sentencepiece on the same lines. MB of text a second of wall time on all cores;
`_memory`: MB at the peak of the process and its workers, the peer's beside it. `train_bpe_superwords`: with a fifth of
the merges across spaces. `count_words`: reading and counting alone, by one process. `--megabytes`: the text is repeated
with words changed until it is as large, so that distinct words grow with it; --ours leaves the peers out."""

import functools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
from measure import Figure, arguments, print_figures
from text import documents

from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.train_tokenizer import SUPERWORD_BYTES, WORD_PATTERN, train_byte_level, train_on_words
from gristmill.tokenizers.training_sample import texts_of_part, training_sample
from gristmill.tokenizers.word_counts import count_sample
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

ROW_GROUP_BYTES = 4_000_000


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=["bpe", "superwords", "unigram", "count"], help="one of the trainings")
    parser.add_argument("--ours", action="store_true", help="without the peers")
    parser.add_argument("--corpus", type=Path, help="folder of the text, kept")
    parser.add_argument("--run", nargs=3, metavar=("WHAT", "CORPUS", "VOCABULARY"), help="one training here")
    options = parser.parse_args()
    if options.run:
        what, corpus, size = options.run
        return run_training(what, corpus, size, options.workers)
    megabytes = options.megabytes or (4 if options.quick else 32)
    vocabulary = options.vocabulary or (4000 if options.quick else 32_000)
    with tempfile.TemporaryDirectory() as name:
        corpus = options.corpus or Path(name)
        if not (corpus / "documents").exists():
            write_corpus(corpus, repeated(documents(options.data, megabytes * 1_000_000), megabytes * 1_000_000))
        figures = []
        for what in [options.only] if options.only else ["bpe", "superwords", "unigram", "count"]:
            figures += compared(what, corpus, vocabulary, megabytes, options)
        print_figures(figures)


def compared(what: str, corpus: Path, vocabulary: int, megabytes: int, options) -> list[Figure]:
    """Each training in a process of its own."""
    call = functools.partial(measured, corpus=corpus, vocabulary=vocabulary, workers=options.workers)
    own_seconds, own_memory = call(what)
    name = {"count": "count_words", "superwords": "train_bpe_superwords"}.get(what, f"train_{what}")
    peer = {"bpe": "tokenizers", "unigram": "sentencepiece"}.get(what)
    if peer is None or options.ours:
        return [
            Figure(name, megabytes / own_seconds, "MB/s"),
            Figure(f"{name}_seconds", own_seconds, "s"),
            Figure(f"{name}_memory", own_memory, "MB"),
        ]
    seconds, memory = call(peer)
    label = f"{peer} {version(peer)}"
    ratio, saving = seconds / own_seconds, memory / own_memory
    return [
        Figure(name, megabytes / own_seconds, "MB/s", megabytes / seconds, label, ratio),
        Figure(f"{name}_memory", own_memory, "MB", memory, label, saving),
    ]


def measured(what: str, corpus: Path, vocabulary: int, workers: int) -> tuple[float, float]:
    """(seconds, MB at the peak) of one training."""
    command = [sys.executable, __file__, "--run", what, str(corpus), str(vocabulary), "--workers", str(workers)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout.split()
    return float(out[-2]), float(out[-1])


def run_training(what: str, corpus: str, vocabulary: str, workers: int) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        TRAININGS[what](Path(corpus), int(vocabulary), workers, Path(folder))
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        + workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    )
    print(time.perf_counter() - start, peak / 1e3)


def train_ours(config: TokenizerConfig, corpus: Path, workers: int, folder: Path) -> None:
    """As the stage does it."""
    engine = LocalEngine(workers, Reporter.silent())
    selections, _ = training_sample(corpus, ["text"], config, 0, engine)
    by_bytes = config.algorithm == "byte_bpe"
    words = count_sample(selections, folder, engine, by_bytes)
    engine.close()
    print(f"{len(words)} distinct words", file=sys.stderr)
    if by_bytes:
        train_byte_level(words, texts_of_part(selections, SUPERWORD_BYTES), config)
    else:
        train_on_words(words, config)


def ours(corpus: Path, vocabulary: int, workers: int, folder: Path, **fields) -> None:
    train_ours(TokenizerConfig(vocab_size=vocabulary, sample_bytes=10**12, **fields), corpus, workers, folder)


def count_only(corpus: Path, vocabulary: int, workers: int, folder: Path) -> None:
    """Reading and counting in this process."""
    engine = LocalEngine(1, Reporter.silent())
    config = TokenizerConfig(vocab_size=vocabulary, sample_bytes=10**12)
    selections, _ = training_sample(corpus, ["text"], config, 0, engine)
    count_sample(selections, folder, engine)


def by_tokenizers(corpus: Path, vocabulary: int, workers: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD_PATTERN.replace("DIGITS", r"\\p{N}")), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus_texts(corpus), trainer)


def by_sentencepiece(corpus: Path, vocabulary: int, workers: int, folder: Path) -> None:
    """The settings of our unigram models, on lines."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus_texts(corpus) for line in text.splitlines()),
        model_prefix=str(folder / "model"),
        model_type="unigram",
        vocab_size=vocabulary,
        normalization_rule_name="identity",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=32_000,
        num_threads=workers,
        minloglevel=2,
    )


TRAININGS: dict[str, Callable[[Path, int, int, Path], None]] = {
    "bpe": functools.partial(ours, algorithm="byte_bpe"),
    "superwords": functools.partial(ours, algorithm="byte_bpe", superwords=0.2),
    "unigram": functools.partial(ours, algorithm="unigram"),
    "count": count_only,
    "tokenizers": by_tokenizers,
    "sentencepiece": by_sentencepiece,
}


def corpus_texts(corpus: Path) -> Iterator[str]:
    for path in sorted((corpus / "documents" / "train").glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["text"], batch_size=256):
            yield from batch["text"].to_pylist()


def repeated(texts: list[str], num_bytes: int) -> Iterator[str]:
    """The texts until they are num_bytes, from the second time on with one word in 50 changed."""
    size = turn = 0
    while size < num_bytes:
        for text in texts:
            words = text.split(" ")
            words[turn % 50 :: 50] = [f"{word}{turn}" for word in words[turn % 50 :: 50]] if turn else words[::50]
            yield (changed := " ".join(words))
            size += len(changed)
            if size >= num_bytes:
                return
        turn += 1


def write_corpus(corpus: Path, texts: Iterator[str]) -> None:
    """A corpus of one source with row groups of about ROW_GROUP_BYTES."""
    path = corpus / "documents" / "train" / "text-00000.parquet"
    path.parent.mkdir(parents=True)
    with pq.ParquetWriter(path, pa.schema({"text": pa.string()}), compression="zstd") as writer:
        group: list[str] = []
        size = 0
        for text in texts:
            group.append(text)
            size += len(text)
            if size >= ROW_GROUP_BYTES:
                writer.write_table(pa.table({"text": group}))
                group, size = [], 0
        if group:
            writer.write_table(pa.table({"text": group}))


if __name__ == "__main__":
    main()
