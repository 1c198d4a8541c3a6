"""Small tokenizers, trained once, on the words of the running Python and on text of several scripts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.data_pipeline.provenance.files import write_atomic
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.export import write_huggingface
from gristmill.tokenizers.tokenizer import MODEL_NAME
from gristmill.tokenizers.train import train

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
    """trained(strategy="case") -> a whole tokenizer folder; the same settings are trained once."""
    folders: dict[TokenizerConfig, Path] = {}

    def make(**settings) -> Path:
        config = TokenizerConfig(**{"vocab_size": 1500, **settings})
        if config not in folders:
            folder = tmp_path_factory.mktemp("tokenizer")
            write_atomic(folder / MODEL_NAME, train(training_texts, config))
            write_huggingface(folder, config.case_marks)
            folders[config] = folder
        return folders[config]

    return make
