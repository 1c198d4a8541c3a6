"""Mutated model files: loaded and used as they are, or one clear error; no crash, no hang, no gigabytes.

Mutants run in forked children, so a fault of compiled code is seen as the death of a child, which names its mutant."""

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gristmill.data_pipeline.extraction.weights import BUNDLED_PATH, _loaded
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.fasttext_predict import predict
from gristmill.data_pipeline.signals.language import load_model
from gristmill.evaluation.convert.model_tokenizer import load_model_tokenizer
from gristmill.evaluation.convert.safetensors_folder import SafetensorsFolder
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.tokenizers.tokenizer import load_tokenizer
from tests.support.fasttext_file import write_random_model, write_random_quantized_model
from tests.support.mutations import mutate
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SEED = 34
IN_CI, SLOW = 330, 16_500  # mutants of a format; seven formats
BATCH = 110  # mutants of one child
SECONDS, BYTES = 20, 1 << 30  # a mutant's time, and memory beyond what the child begins with
TEXTS = TextBuffer.of(["the mill grinds grain", "das Mühlrad", "", "ABC def 123 水車", "a" * 300])


def fasttext(loss: int, chars: tuple[int, int], ngrams: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        return write_random_model(
            folder / "model.bin", ["the", "mill", "</s>"], ["en", "de", "fr"], loss, chars, ngrams
        )

    return write


def quantized_fasttext(folder: Path) -> Path:
    return write_random_quantized_model(folder / "model.ftz", ["the", "mill", "</s>"], ["en", "de", "fr"], 1, True)


def use_fasttext(path: Path) -> None:
    model = load_model.__wrapped__(str(path))
    labels, _ = predict(TEXTS, model.arrays, 1000, skip_capitals=True)
    assert labels.max() < len(model.codes)


def write_bpe(folder: Path) -> Path:
    """A byte-level tokenizer.json with merges, a normalizer and a post-processor."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"th": 256, "the": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 259)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def use_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path.parent)
    tokenizer.decode(tokenizer.encode("the mill ☃"))
    if path.name == "tokenizer.json":
        load_model_tokenizer(path.parent)


def write_sentencepiece(folder: Path) -> Path:
    import sentencepiece

    lines = ["the mill grinds grain by the river", "water turns the wheel", "grain and flour and bread"] * 20
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=30, model_type="unigram", minloglevel=2
        )
    return folder / "tokenizer.model"


def copy_weights(folder: Path) -> Path:
    return Path(shutil.copy(BUNDLED_PATH, folder / "weights.npz"))


def use_weights(path: Path) -> None:
    _loaded.__wrapped__(path, 0)


def write_safetensors(folder: Path) -> Path:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def use_safetensors(path: Path) -> None:
    for tensor in SafetensorsFolder(path.parent).values():
        tensor.sum()


FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "fastText, softmax": (fasttext(3, (0, 0), 1), use_fasttext),
    "fastText, tree and n-grams": (fasttext(1, (2, 4), 2), use_fasttext),
    "fastText, quantized": (quantized_fasttext, use_fasttext),
    "tokenizer.json": (write_bpe, use_tokenizer),
    "SentencePiece": (write_sentencepiece, use_tokenizer),
    "npz": (copy_weights, use_weights),
    "safetensors": (write_safetensors, use_safetensors),
}


def run_mutants(folder: Path, path: Path, use: Callable[[Path], None], numbers: range, seed: int) -> None:
    """In this process: each mutant is used, or refused with an error of ours. Writes the number before each."""
    content = path.read_bytes()
    outcomes = {"used": 0, "refused": 0}
    with (folder / "number").open("w") as mark:
        for number in numbers:
            mark.seek(0)
            mark.write(f"{number:8}")
            mark.flush()
            path.write_bytes(mutate(content, np.random.default_rng([seed, number])))
            signal.alarm(SECONDS)
            try:
                use(path)
                outcomes["used"] += 1
            except (InputError, RecipeError, ValueError) as error:
                if isinstance(error, ValueError) and use is not use_fasttext:
                    raise
                assert str(error).strip()
                outcomes["refused"] += 1
            signal.alarm(0)
    (folder / "outcomes").write_text(json.dumps(outcomes))


def in_child(folder: Path, work: Callable[[], None]) -> str | None:
    """None if the work ended well, else how it ended. The child's memory is limited to BYTES more than it has."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status == 0:
            return None
        log = (folder / "error").read_text("utf-8", "replace")[-2000:]
        return f"status {os.waitstatus_to_exitcode(status)}, mutant {(folder / 'number').read_text().strip()}: {log}"
    code = 1
    try:
        (folder / "error").write_text("")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        work()
        code = 0
    except BaseException:
        import traceback

        with (folder / "error").open("w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def check(name: str, tmp_path: Path, count: int, seed: int) -> dict[str, int]:
    write, use = FORMATS[name]
    path = write(tmp_path)
    content = path.read_bytes()
    use(path)  # as it is, and so that kernels are compiled before the forks
    total = {"used": 0, "refused": 0}
    for start in range(0, count, BATCH):
        path.write_bytes(content)
        numbers = range(start, min(start + BATCH, count))
        failure = in_child(tmp_path, lambda numbers=numbers: run_mutants(tmp_path, path, use, numbers, seed))
        assert failure is None, f"{name}, seed {seed}: {failure}"
        for outcome, number in json.loads((tmp_path / "outcomes").read_text()).items():
            total[outcome] += number
    return total


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_used_or_refused(tmp_path, name):
    total = check(name, tmp_path, IN_CI, SEED)
    assert sum(total.values()) == IN_CI and total["refused"] > IN_CI // 20


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutants(tmp_path, name):
    started = time.monotonic()
    total = check(name, tmp_path, SLOW, SEED + 1)
    print(f"{name}: {total}, {time.monotonic() - started:.0f} s")


def test_an_id_far_beyond_the_vocabulary_is_refused(tmp_path):
    """One id of 400,000,000 would make a list of 3 GB."""
    path = write_bpe(tmp_path)
    content = json.loads(path.read_text())
    content["model"]["vocab"]["the"] = 400_000_000
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer\.json: the id 400000000"):
        load_tokenizer(tmp_path)


def test_an_empty_vocabulary_is_refused(tmp_path):
    Tokenizer(models.BPE(vocab={}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer\.json: has no pieces"):
        load_tokenizer(tmp_path)


def test_a_model_with_n_grams_and_no_bucket_is_refused(tmp_path):
    """The number of buckets, one of the first numbers of the file, is 0: a hash modulo 0 would be read."""
    path = fasttext(3, (2, 4), 2)(tmp_path)
    content = bytearray(path.read_bytes())
    content[8 + 4 * 8 : 8 + 4 * 9] = bytes(4)
    path.write_bytes(bytes(content))
    with pytest.raises((RecipeError, InputError), match="bucket"):
        load_model.__wrapped__(str(path))
