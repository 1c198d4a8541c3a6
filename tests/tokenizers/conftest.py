"""Small tokenizers, trained once on words of the Python installation and on text in several scripts."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.foundation.files import write_atomic
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.export import write_huggingface
from gristmill.tokenizers.tokenizer import MODEL_NAME
from gristmill.tokenizers.train_tokenizer import train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SCRIPTS = (
    "Съешь ещё этих мягких французских булок, да выпей чаю.\n",
    "いろはにほへと ちりぬるを 日本語の文字。\n",
    "키스의 고유조건은 입술끼리 만나야 하고\n",
    "निज भाषा उन्नति अहै, सब उन्नति को मूल।\n",
    "نص حكيم له سر قاطع وذو شأن عظيم\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 0123456789\n",
    "emoji 😀👍🏽 and\ttabs    and runs of spaces\n\n\n",
)


@pytest.fixture(scope="session")
def training_texts(small_corpus: Path) -> list[str]:
    """About 1 MB; the modules whose names begin with a to f stay held out."""
    files = sorted(small_corpus.glob("*.txt"))
    texts = [path.read_text("utf-8") for path in files if path.name[0] > "f"]
    return texts + ["".join(SCRIPTS)] * 20


@pytest.fixture(scope="session")
def held_out_texts(small_corpus: Path) -> list[str]:
    return [path.read_text("utf-8") for path in sorted(small_corpus.glob("[a-f]*.txt"))] + list(SCRIPTS)


@pytest.fixture(scope="session")
def trained(training_texts, tmp_path_factory) -> Callable[..., Path]:
    """trained(preset="case") -> a whole tokenizer folder; the same settings are trained once."""
    folders: dict[TokenizerConfig, Path] = {}

    def make(**settings) -> Path:
        config = TokenizerConfig(**{"vocab_size": 1500, **settings})
        if config not in folders:
            folder = tmp_path_factory.mktemp("tokenizer")
            write_atomic(folder / MODEL_NAME, train(training_texts, config))
            write_huggingface(folder)
            folders[config] = folder
        return folders[config]

    return make


@pytest.fixture(scope="session")
def gpt2_like(training_texts, tmp_path_factory):
    """A byte-level BPE as GPT-2's, trained by Hugging Face's own library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(training_texts, trainer)
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def ranks(gpt2_like, byte_names, tmp_path_factory):
    """The same vocabulary as tiktoken writes it: base64 of the bytes, and the rank."""
    byte_of = {name: number for number, name in byte_names.items()}
    content = json.loads(gpt2_like.read_text())
    single = [piece for piece in content["model"]["vocab"] if len(piece) == 1]
    joined = ["".join(merge) for merge in content["model"]["merges"]]
    tokens = [bytes(byte_of[character] for character in piece) for piece in [*single, *joined]]
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path, {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="session")
def byte_names() -> dict[int, str]:
    """GPT-2's printable names of bytes, by the loop of its encoder.py."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names, extra = {byte: chr(byte) for byte in kept}, 0
    for byte in range(256):
        if byte not in names:
            names[byte] = chr(256 + extra)
            extra += 1
    return names
