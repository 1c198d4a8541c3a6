"""Speed of encoding text and documents to .bin/.idx, compared with sentencepiece and Megatron-LM's preprocess_data.py.

`encode`: one thread each, MB of text per CPU second, the ids compared one by one.
`documents_to_index`: the index stage of one worker against a stand-in for Megatron-LM's tools/preprocess_data.py:
JSON lines, a pool of one process with sentencepiece, and the builder of megatron-core if it is installed (the builder
is written out here, with the same calls to numpy, where it is not).
`encode_tiktoken`: a byte-level BPE written as tiktoken ranks and adopted, against tiktoken itself, one thread each.
`encode_adopted`: the same against Hugging Face's tokenizers, which encode what tiktoken is not proved equal on."""

import base64
import functools
import json
import multiprocessing
import shutil
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import tiktoken
from measure import Figure, arguments, in_turn, print_figures
from text import documents

import tokenizers
from gristmill.data_pipeline.indexed.documents import document_ranges
from gristmill.data_pipeline.indexed.merge import merge
from gristmill.data_pipeline.indexed.permutation import key_of
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.tokenizers.adversarial import adversarial_strings
from gristmill.tokenizers.byte_level import BYTE_OF, GPT2_PATTERN
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encode import EncodeTask, encode_documents, encode_tasks
from gristmill.tokenizers.pretrained import copy_pretrained
from gristmill.tokenizers.tokenizer import MODEL_NAME, load_bulk_tokenizer, load_tokenizer
from gristmill.tokenizers.train import train


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    megabytes = 4 if options.quick else 40
    texts = documents(options.data, megabytes * 1_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = min(options.vocabulary, 8000) if options.quick else options.vocabulary
        (folder / MODEL_NAME).write_bytes(train(texts[::2], TokenizerConfig(vocab_size=vocabulary)))
        held_out = texts[1::2]
        print(
            f"{len(held_out)} held-out documents, {size(held_out) / 1e6:.1f} MB; {vocabulary} pieces", file=sys.stderr
        )
        rounds = 2 if options.quick else options.rounds
        print_figures(
            [
                encoding(folder, held_out, rounds),
                *indexing(folder, held_out, rounds),
                *adopted(folder / "ranks", texts[::2], held_out, vocabulary, rounds),
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
    """Speed of a pretrained byte-level BPE. Raises SystemExit if an id differs, or if tiktoken does not encode it."""
    folder.mkdir()
    path = folder / "bpe.tiktoken"
    ranks = byte_level_ranks(training, vocabulary)
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    copy_pretrained(TokenizerConfig(pretrained=str(path)), folder)
    ours, reference = load_bulk_tokenizer(folder), load_tokenizer(folder)
    encoding = tiktoken.Encoding("peer", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    peer = functools.partial(encoding.encode_ordinary_batch, num_threads=1)
    if ours.encoder != "tiktoken" or ours.encode_batch(texts) != peer(texts):
        sys.exit(f"encoded by {ours.encoder}, or with other ids than tiktoken's")
    megabytes = size(texts) / 1e6
    figures = []
    for name, peer_name, call in (
        (
            "encode_tiktoken",
            f"tiktoken {tiktoken.__version__}",
            lambda: peer(texts),
        ),
        ("encode_adopted", f"tokenizers {tokenizers.__version__}", lambda: reference.encode_batch(texts)),
    ):
        own, other, ratio = in_turn(lambda: ours.encode_flat(texts), call, rounds)
        figures.append(Figure(name, megabytes / own, "MB/s/core", megabytes / other, peer_name, ratio))
    return figures


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
    corpus = folder / "corpus"
    path = corpus / "documents" / "train" / "text-00000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", row_group_size=1024)
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own, other, ratio = in_turn(
        lambda: index(corpus, folder, folder / "ours"),
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


def index(corpus: Path, tokenizer: Path, folder: Path) -> None:
    """The index stage for one source: encode its slices, then shuffle them into one file."""
    shutil.rmtree(folder, ignore_errors=True)
    encoder = load_bulk_tokenizer(tokenizer).encoder
    ranges = document_ranges(corpus, "train", "text")
    tasks = encode_tasks(ranges, EncodeTask(tokenizer, encoder, (), folder / "parts" / "text"))
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
