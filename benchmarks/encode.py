"""Speed of encoding text and documents to .bin/.idx, compared with sentencepiece and Megatron-LM's preprocess_data.py.

`encode`: one thread each, MB of text per CPU second, the ids compared one by one.
`documents_to_index`: the index stage of one worker against a stand-in for Megatron-LM's tools/preprocess_data.py:
JSON lines, a pool of one process with sentencepiece, and the builder of megatron-core if it is installed (the builder
is written out here, with the same calls to numpy, where it is not).
`encode_bpe_cold`, `encode_bpe_warm`: a byte-level BPE written as tiktoken ranks and adopted, with empty caches and with
those that the same text filled; then in the same run against gigatoken, tiktoken, tokenizers and kitoken, one thread
each. `encode_bpe_memory`: MB that the first pass adds to the process.
`encode_wordpiece_cold`, `encode_wordpiece_warm`, `encode_metaspace_*`: a WordPiece and a BPE with Metaspace, trained by
tokenizers, encoded by cached words against tokenizers.
`documents_to_index_bpe_50k`, `_128k` (alone with `--part index`): the index stage of one worker with a byte-level BPE
on documents of 4 kB, its start included: the text and ten times as much of the source code and documents of the
installed Python packages. Beside it on half of the text alone: `_unseen`: after the worker has indexed the other half;
`_cold`: by a worker that has just started, without its start; `_warm`: the same documents again; `_library`: those of
`_unseen` by gigatoken alone, which reads and writes nothing: the index stage cannot be faster; `_start`: seconds of a
worker's start; `_choice`: of choosing the encoder, the first time; `_choice_kept`: the next times. The vocabularies are
trained on all of the text: half of it has too few pieces."""

import base64
import functools
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import kitoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import tiktoken
from gigatoken.gigatoken_rs import load_hf_json
from measure import Figure, OwnProcess, arguments, cpu_seconds, in_turn, print_figures
from text import documents, installed_texts

import tokenizers
from gristmill.data_pipeline.corpus.splits import document_ranges
from gristmill.data_pipeline.indexed.dataset import merge
from gristmill.data_pipeline.indexed.draws import key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.tokenizers.byte_level import BYTE_OF, GPT2_PATTERN, resident_bytes
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encoders import Encoder, adversarial_strings
from gristmill.tokenizers.index_corpus import EncodeTask, _loaded, _loaded_once, encode_documents, encode_tasks
from gristmill.tokenizers.pretrained import copy_pretrained
from gristmill.tokenizers.tokenizer import (
    JSON_NAME,
    MODEL_NAME,
    Tokenizer,
    choice_path,
    load_bulk_tokenizer,
    load_encoder,
    load_tokenizer,
)
from gristmill.tokenizers.train_tokenizer import train
from tokenizers import models, normalizers, pre_tokenizers, trainers

DOCUMENT_CHARACTERS = 4000
ROW_GROUP_ROWS = 900  # 3.6 MB, as curation writes them (corpus/shards.py)
INDEX_VOCABULARIES = (50_000, 128_000)
LONG_BYTES_OF_TEXT = 10  # of installed packages, for each byte of the text
SPECIAL = ["[UNK]", "<|endoftext|>"]
Peer = tuple[str, Callable[[], object], Callable[[], list[list[int]]] | None]  # name, what is timed, ids to compare


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    parts = "index: documents_to_index_bpe_* alone; bpe: encode_bpe_* alone"
    parser.add_argument("--part", choices=["all", "index", "bpe"], default="all", help=parts)
    options = parser.parse_args()
    megabytes = 4 if options.quick else 40
    texts = documents(options.data, megabytes * 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "index":
            return print_figures(indexing_bpe(folder, texts, [8000] if options.quick else INDEX_VOCABULARIES))
        vocabulary = min(options.vocabulary, 8000) if options.quick else options.vocabulary
        held_out = texts[1::2]
        if options.part == "bpe":
            return print_figures(adopted(folder / "ranks", texts[::2], held_out, vocabulary, options.rounds))
        (folder / MODEL_NAME).write_bytes(train(texts[::2], TokenizerConfig(vocab_size=vocabulary)))
        print(
            f"{len(held_out)} held-out documents, {size(held_out) / 1e6:.1f} MB; {vocabulary} pieces", file=sys.stderr
        )
        rounds = 2 if options.quick else options.rounds
        print_figures(
            [
                encoding(folder, held_out, rounds),
                *indexing(folder, held_out, rounds),
                *adopted(folder / "ranks", texts[::2], held_out, vocabulary, rounds),
                *by_words(folder, texts[::2], held_out, vocabulary, rounds),
                *indexing_bpe(folder, texts, [8000] if options.quick else INDEX_VOCABULARIES),
            ]
        )


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def encoding(folder: Path, texts: list[str], rounds: int) -> Figure:
    """Speed of the trained tokenizers. Raises SystemExit if a single id differs."""
    ours = load_bulk_tokenizer(folder)
    peer = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_NAME))
    strings = texts + adversarial_strings([piece.replace("▁", " ") for piece in ours.pieces])
    different = sum(left != right for left, right in zip(ours.encode_batch(strings), peer.encode(strings), strict=True))
    if different:
        sys.exit(f"{different} of {len(strings)} texts have other ids")
    own, other, ratio = in_turn(lambda: ours.encode_flat(texts), lambda: peer.encode(texts, num_threads=1), rounds)
    megabytes = size(texts) / 1e6
    name = f"sentencepiece {sentencepiece.__version__}"
    return Figure("encode", megabytes / own, "MB/s/core", megabytes / other, name, ratio, goal=3.5)


def adopted(folder: Path, training: list[str], texts: list[str], vocabulary: int, rounds: int) -> list[Figure]:
    """Speed of a pretrained byte-level BPE. Raises SystemExit if an id differs from tokenizers', or tiktoken's."""
    ranks = byte_level_ranks(training, vocabulary)
    adopt_ranks(folder, ranks)
    content = json.loads((folder / JSON_NAME).read_bytes())
    ours, megabytes = load_bulk_tokenizer(folder), size(texts) / 1e6
    worker = functools.partial(fresh_encoder, folder, ours)
    buffer, ends = packed(texts)
    expected = ours.encode_batch(texts)
    print(f"{ours.encoder} encodes {len(ranks)} ranks", file=sys.stderr)
    cold = [
        cpu_seconds(functools.partial(fresh.encode_utf8, buffer, ends, ours.end_of_document))
        for fresh in (worker() for _ in range(rounds))
    ]
    encode = functools.partial(worker().encode_utf8, buffer, ends, ours.end_of_document)
    figures = [Figure("encode_bpe_cold", megabytes / statistics.median(cold), "MB/s/core", goal=60)]
    for number, (name, call, ids) in enumerate(bpe_peers(folder, ranks, content, texts)):
        if ids is not None and ids() != expected:
            sys.exit(f"{name} gives other ids")
        own, other, ratio = in_turn(encode, call, rounds)
        if number == 0:
            figures.append(Figure("encode_bpe_warm", megabytes / own, "MB/s/core", goal=150))
        rates = megabytes / own, "MB/s/core", megabytes / other
        figures.append(Figure(f"encode_bpe_warm_{name.split()[0]}", *rates, name, ratio))
    process = OwnProcess(encoding_memory, folder, texts)
    figures.append(Figure("encode_bpe_memory", process.ask(call_it), "MB"))
    process.close()
    return figures


def by_words(folder: Path, training: list[str], texts: list[str], vocabulary: int, rounds: int) -> list[Figure]:
    """Speed of families that cached words encode, with empty and filled caches. Raises SystemExit if an id differs."""
    figures, name = [], f"tokenizers {tokenizers.__version__}"
    buffer, ends = packed(texts)
    megabytes = size(texts) / 1e6
    for family, tokenizer, trainer in (
        ("wordpiece", wordpiece(), trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL)),
        ("metaspace", metaspace(), trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL)),
    ):
        (folder / family).mkdir()
        tokenizer.train_from_iterator(training, trainer)
        tokenizer.save(str(folder / f"{family}.json"))
        copy_pretrained(TokenizerConfig(pretrained=str(folder / f"{family}.json")), folder / family)
        ours, reference = load_bulk_tokenizer(folder / family), load_tokenizer(folder / family)
        print(f"{ours.encoder} encodes {family}", file=sys.stderr)
        if ours.encode_batch(texts) != reference.encode_batch(texts):
            sys.exit(f"{family}: tokenizers gives other ids")
        cold = statistics.median(
            cpu_seconds(functools.partial(fresh.encode_utf8, buffer, ends, ours.end_of_document))
            for fresh in [fresh_encoder(folder / family, ours) for _ in range(rounds)]
        )
        encode = functools.partial(fresh_encoder(folder / family, ours).encode_utf8, buffer, ends, ours.end_of_document)
        encode_reference = functools.partial(reference.encode_batch, texts)
        own, other, ratio = in_turn(encode, encode_reference, rounds)
        rates = "MB/s/core", megabytes / other, name
        figures.append(Figure(f"encode_{family}_cold", megabytes / cold, *rates, other / cold))
        figures.append(Figure(f"encode_{family}_warm", megabytes / own, *rates, ratio))
    return figures


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=SPECIAL[0]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=SPECIAL[0], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def bpe_peers(folder: Path, ranks: dict[bytes, int], content: dict[str, Any], texts: list[str]) -> Iterator[Peer]:
    """kitoken's ids are not compared: it is a peer on the clock alone."""
    raw = [text.encode() for text in texts]
    giga = load_hf_json(json.dumps(content | {"added_tokens": []}))
    yield f"gigatoken {version('gigatoken')}", lambda: [giga.encode(text) for text in raw], None
    encoding = tiktoken.Encoding("peer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    encode = functools.partial(encoding.encode_ordinary_batch, texts, num_threads=1)
    yield f"tiktoken {tiktoken.__version__}", encode, encode
    reference = load_tokenizer(folder)
    encode_reference = functools.partial(reference.encode_batch, texts)
    yield f"tokenizers {tokenizers.__version__}", encode_reference, encode_reference
    kit = kitoken.Kitoken.from_tokenizers_file(str(folder / JSON_NAME))
    yield f"kitoken {version('kitoken')}", lambda: kit.encode_all(texts, False), None


def packed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw), np.uint8), np.cumsum([len(text) for text in raw], dtype=np.int64)


def fresh_encoder(folder: Path, chosen: Tokenizer) -> Encoder:
    """A worker's encoder, loaded, with empty caches."""
    encoder = load_encoder(folder, chosen.encoder, chosen.differing)
    encoder.encode("a")
    return encoder


def encoding_memory(folder: Path, texts: list[str]) -> Callable[[], float]:
    """A function that encodes the texts in batches as the index stage does, and returns the MB that it adds."""
    encoder = fresh_encoder(folder, load_bulk_tokenizer(folder))

    def encode() -> float:
        before = resident_bytes()
        for start in range(0, len(texts), 256):
            encoder.encode_utf8(*packed(texts[start : start + 256]))
        return (resident_bytes() - before) / 1e6

    return encode


def call_it(function: Callable[[], float]) -> float:
    return function()


def indexing_bpe(folder: Path, texts: list[str], vocabularies: Sequence[int]) -> list[Figure]:
    """MB per CPU second of the index stage with byte-level BPE, and the seconds that it takes before the first text."""
    seen, unseen = (write_corpus(folder / name, cut(texts[part::2])) for part, name in enumerate(("seen", "unseen")))
    megabytes = size(texts[1::2]) / 1e6
    long_texts = mixed(texts, installed_texts(LONG_BYTES_OF_TEXT * size(texts)))
    long = write_corpus(folder / "long", cut(long_texts))
    figures = []
    for vocabulary in vocabularies:
        tokenizer = folder / f"bpe{vocabulary}"
        adopt_ranks(tokenizer, byte_level_ranks(texts, vocabulary))
        if (kept := choice_path(tokenizer)) is not None:
            kept.unlink(missing_ok=True)
        choosing = cpu_seconds(functools.partial(load_bulk_tokenizer, tokenizer))
        start = time.process_time()
        chosen = load_bulk_tokenizer(tokenizer)
        again = time.process_time() - start
        _loaded.cache_clear()
        whole = cpu_seconds(functools.partial(index, long, tokenizer, chosen, folder / "out"))
        _loaded.cache_clear()
        call = functools.partial(index, unseen, tokenizer, chosen, folder / "out")
        starting = cpu_seconds(functools.partial(fresh_encoder, tokenizer, chosen))
        _loaded_once(tokenizer, chosen.encoder, chosen.differing).encode("a")
        cold = cpu_seconds(call)
        _loaded.cache_clear()
        index(seen, tokenizer, chosen, folder / "out")
        figure = f"documents_to_index_bpe_{vocabulary // 1000}k"
        library = cpu_seconds(unseen_by_gigatoken(tokenizer, *(cut(texts[part::2]) for part in range(2))))
        figures += [
            Figure(figure, size(long_texts) / 1e6 / whole, "MB/s/core", goal=80),
            Figure(f"{figure}_unseen", megabytes / cpu_seconds(call), "MB/s/core"),
            Figure(f"{figure}_warm", megabytes / cpu_seconds(call), "MB/s/core"),
            Figure(f"{figure}_cold", megabytes / cold, "MB/s/core"),
            Figure(f"{figure}_start", starting, "s"),
            Figure(f"{figure}_library", megabytes / library, "MB/s/core"),
            Figure(f"{figure}_choice", choosing, "s"),
            Figure(f"{figure}_choice_kept", again, "s"),
        ]
    return figures


def unseen_by_gigatoken(tokenizer: Path, seen: list[str], unseen: list[str]) -> Callable[[], None]:
    """Encodes the unseen texts by the library alone, after it has encoded the seen ones."""
    backend = load_hf_json(json.dumps(json.loads((tokenizer / JSON_NAME).read_bytes()) | {"added_tokens": []}))
    for text in seen:
        backend.encode(text.encode())
    raw = [text.encode() for text in unseen]

    def encode() -> None:
        for text in raw:
            backend.encode(text)

    return encode


def mixed(*groups: list[str]) -> list[str]:
    texts = [text for group in groups for text in group]
    random.Random(0).shuffle(texts)
    return texts


def cut(texts: list[str]) -> list[str]:
    text = "".join(texts)
    return [text[start : start + DOCUMENT_CHARACTERS] for start in range(0, len(text), DOCUMENT_CHARACTERS)]


def adopt_ranks(folder: Path, ranks: dict[bytes, int]) -> None:
    """Writes tiktoken ranks and adopts them as a pretrained tokenizer."""
    folder.mkdir()
    path = folder / "bpe.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    copy_pretrained(TokenizerConfig(pretrained=str(path)), folder)


def byte_level_ranks(texts: list[str], vocabulary: int) -> dict[bytes, int]:
    """Ranks of a byte-level BPE trained by Hugging Face, in tiktoken's order: the bytes, then the merges."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(BYTE_OF)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {bytes(BYTE_OF[character] for character in piece): rank for piece, rank in pieces}


def indexing(folder: Path, texts: list[str], rounds: int) -> list[Figure]:
    """CPU seconds of indexing, reading and encoding processes together; both sides write the same documents."""
    corpus = write_corpus(folder / "corpus", texts)
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own, other, ratio = in_turn(
        lambda: index(corpus, folder, load_bulk_tokenizer(folder), folder / "ours"),
        lambda: preprocess(lines, folder / MODEL_NAME, folder / "theirs"),
        rounds,
    )
    tokens = IndexedReader(folder / "ours" / "text").num_tokens
    if tokens != IndexedReader(folder / "theirs").num_tokens:
        sys.exit("the two wrote other numbers of tokens")
    megabytes = size(texts) / 1e6
    peer = f"preprocess_data ({builder_name()})"
    return [
        Figure("documents_to_index", megabytes / own, "MB/s/core", megabytes / other, peer, ratio, 12),
        Figure("documents_to_index_rate", megabytes / own, "MB/s/core", goal=40),
    ]


def write_corpus(corpus: Path, texts: list[str]) -> Path:
    path = corpus / "documents" / "train" / "text-00000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(
        pa.table({"text": texts}), path, compression="zstd", row_group_size=ROW_GROUP_ROWS, use_dictionary=False
    )
    return corpus


def index(corpus: Path, tokenizer: Path, chosen: Tokenizer, folder: Path) -> None:
    """The index stage for one source: encode its slices, then shuffle them into one file. chosen: the tokenizer, as the
    parent of the workers has loaded it."""
    shutil.rmtree(folder, ignore_errors=True)
    parts, ids = folder / "parts" / "text", (chosen.vocab_size, chosen.end_of_document)
    common = EncodeTask(tokenizer, chosen.encoder, *ids, (), parts, differing=chosen.differing)
    tasks = encode_tasks(document_ranges(corpus, "train", "text"), common)
    for task in tasks:
        encode_documents(task)
    merge([task.prefix for task in tasks], folder / "text", key_of(0, "documents"))


def preprocess(lines: Path, model: Path, prefix: Path) -> None:
    """Megatron-LM's tools/preprocess_data.py with --workers 1 --append-eod: encode in the pool, add item by item."""
    with lines.open(encoding="utf-8") as file, multiprocessing.Pool(1, functools.partial(load, str(model))) as pool:
        builder = builder_at(prefix)
        for ids, lengths in pool.imap(encode_line, file, 32):
            add_document(builder, ids, lengths)
    builder.finalize(f"{prefix}.idx")


_model: sentencepiece.SentencePieceProcessor


def load(model: str) -> None:
    global _model
    _model = sentencepiece.SentencePieceProcessor(model_file=model)


def encode_line(line: str) -> tuple[list[int], list[int]]:
    ids = _model.encode(json.loads(line)["text"])
    ids.append(_model.eos_id())
    return ids, [len(ids)]


class Builder:
    """The work of megatron.core's IndexedDatasetBuilder for each document, for machines without megatron.core."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.lengths: list[int] = []

    def add_document(self, ids: list[int], lengths: list[int]) -> None:
        self.file.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
        self.lengths.extend(lengths)

    def finalize(self, path: str) -> None:
        self.file.close()
        header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
        counts = np.array([len(self.lengths), len(self.lengths) + 1], "<u8").tobytes()
        pointer, pointers = 0, []
        for length in self.lengths:
            pointers.append(pointer)
            pointer += length * 2
        lengths = np.array(self.lengths, "<i4").tobytes()
        bounds = np.arange(len(self.lengths) + 1, dtype="<i8").tobytes()
        Path(path).write_bytes(header + counts + lengths + np.array(pointers, "<i8").tobytes() + bounds)


def builder_at(prefix: Path):
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # optional extra `bench`
    except ImportError:
        return Builder(Path(f"{prefix}.bin").open("wb"))
    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)


def builder_name() -> str:
    try:
        import megatron.core  # optional extra `bench`
    except ImportError:
        return "sentencepiece, the builder written out"
    return f"sentencepiece, megatron-core {megatron.core.__version__}"


def add_document(builder, ids: list[int], lengths: list[int]) -> None:
    if isinstance(builder, Builder):
        builder.add_document(ids, lengths)
        return
    import torch  # megatron-core brings it

    builder.add_document(torch.IntTensor(ids), lengths)


if __name__ == "__main__":
    main()
