"""Labels and scores of the compiled kernel against fastText itself."""

import io
import random
from pathlib import Path

import fasttext
import numpy as np
import orjson
import pytest
import zstandard
from fasttext_file import write_random_model, write_random_quantized_model
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.signals.bits import TextBuffer, joined
from gristmill.data_pipeline.signals.fasttext_model import prepare, projected, read_fasttext
from gristmill.data_pipeline.signals.fasttext_predict import NO_LABEL, predict, token_cache
from gristmill.data_pipeline.signals.language import (
    BUNDLED,
    LanguageConfig,
    detect,
    head,
    label_code,
    load_model,
    model_path,
)
from gristmill.foundation.errors import InputError

# What fastText does not read as a word: the line's end, labels, NUL; white space of Unicode, which it does not know.
TRAPS = (
    "</s>", " </s> ", "__label__en", " __label__xx ", "\0", " \0 ", "\x1c", "\x85", "\xa0", "\u3000", "é", "中", "ABC",
    "İ", "ß", "<", ">", " < ", "\u2028", "мельница", "the", " der ", "ΑΒΓ", "a" * 90,
)  # fmt: skip


@pytest.fixture(scope="module")
def bundled():
    return fasttext.load_model(str(model_path(BUNDLED)))


def differences(model, texts: list[str], chars: int, name: str = BUNDLED) -> float:
    """The largest difference of a score. Asserts equal labels."""
    found = detect(texts, LanguageConfig(chars=chars, model=name)).to_pydict()
    largest = 0.0
    for text, code, score in zip(texts, found["detected_language"], found["language_score"], strict=True):
        line = head(text, chars)
        expected = model.f.predict(line + "\n", 1, 0.0, "strict") if line else []
        if not expected:
            assert (code, score) == ("", 0), repr(text)
            continue
        assert code == label_code(expected[0][1])[0], repr(text[:200])
        largest = max(largest, abs(score - min(expected[0][0], 1.0)))
    return largest


@given(st.lists(st.one_of(st.sampled_from(TRAPS), st.characters(codec="utf-8")), max_size=30).map("".join))
def test_what_fasttext_leaves_out_is_left_out(bundled, text):
    assert differences(bundled, [text, text.upper(), f"the mill {text} am Fluss"], 40) < 1e-5


def shared(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [
            orjson.loads(line)["text"] for line in io.BytesIO(zstandard.ZstdDecompressor().stream_reader(file).read())
        ]


def mutated(text: str, rng: random.Random) -> str:
    pieces = list(text[:400])
    for _ in range(rng.randint(0, 6)):
        pieces.insert(rng.randint(0, len(pieces)), rng.choice(TRAPS))
    return "".join(pieces).upper() if rng.random() < 0.2 else "".join(pieces)


def test_declarations_in_five_hundred_languages_get_the_labels_of_fasttext(bundled, shared_data):
    rng = random.Random(0)
    texts = shared(shared_data("corpora/udhr.jsonl.zst"))
    assert differences(bundled, texts, 300) < 1e-5
    assert differences(bundled, [mutated(text, rng) for text in texts], 1000) < 1e-5


@pytest.mark.slow  # fastText itself takes 100 microseconds a text
@pytest.mark.parametrize("name", ["udhr", "tldr", "kubernetes_community", "rust_book"])
def test_all_shared_texts_get_the_labels_of_fasttext(name, bundled, shared_data):
    rng = random.Random(1)
    texts = shared(shared_data(f"corpora/{name}.jsonl.zst"))
    texts += [line for text in texts[:4000] for line in text.split("\n")[:60]]
    assert differences(bundled, texts, 1000) < 1e-5
    assert differences(bundled, [mutated(text, rng) for text in texts], 300) < 1e-5


@pytest.mark.parametrize("loss", [1, 2, 3, 4])
@pytest.mark.parametrize(("chars", "word_ngrams"), [((0, 0), 1), ((1, 3), 1), ((0, 0), 3), ((2, 4), 2)])
def test_models_of_every_kind(tmp_path, loss, chars, word_ngrams):
    words = ["</s>", "the", "mill", "der", "mühle", "a", "река"]
    path = write_random_model(tmp_path / "m.bin", words, ["de", "en", "ru", "fr", "it"], loss, chars, word_ngrams)
    theirs = fasttext.load_model(str(path))
    rng = random.Random(loss)
    texts = [
        " ".join(rng.choices([*words, "flour", "é", "wheel", "__label__de"], k=rng.randint(0, 9))) for _ in range(60)
    ]
    assert differences(theirs, texts, 200, str(path)) < 1e-4


@pytest.mark.parametrize("loss", [1, 3])
@pytest.mark.parametrize("is_output_quantized", [False, True])
def test_quantized_models(tmp_path, loss, is_output_quantized):
    words = ["</s>", "the", "mill", "der", "mühle", "a", "река"]
    path = write_random_quantized_model(tmp_path / "m.ftz", words, ["de", "en", "ru"], loss, is_output_quantized)
    rng = random.Random(loss)
    texts = [" ".join(rng.choices([*words, "flour", "é", "wheel"], k=rng.randint(0, 9))) for _ in range(200)]
    assert differences(fasttext.load_model(str(path)), texts, 200, str(path)) < 1e-4


def test_texts_and_models_of_any_origin_are_one_form_to_the_kernels(tmp_path):
    """A kernel is compiled for read-only arrays and again for others."""
    words, labels = ["</s>", "the"], ["de", "en"]
    plain = prepare(read_fasttext(write_random_model(tmp_path / "m.bin", words, labels, 3, (0, 0), 1)))
    small = prepare(read_fasttext(write_random_quantized_model(tmp_path / "m.ftz", words, labels, 3, True)))
    forms = [[(array.dtype, array.flags.writeable) for array in model] for model in (plain, small, projected(plain))]
    assert forms[0] == forms[1] == forms[2]
    text, offsets = joined([b"the mill"])
    for made_of in (text, text.copy()):
        buffer = TextBuffer(made_of, offsets)
        assert not buffer.text.flags.writeable and buffer.texts() == ["the mill"]


def test_without_a_line_end_in_the_dictionary_an_unknown_text_has_no_label(tmp_path):
    path = write_random_model(tmp_path / "m.bin", ["the", "mill"], ["de", "en"], 3, (0, 0), 1)
    labels, scores = predict(TextBuffer.of(["flour", "the", ""]), prepare(read_fasttext(path)), 100, False)
    assert labels.tolist()[::2] == [NO_LABEL, NO_LABEL] and labels[1] >= 0
    assert scores.tolist()[::2] == [0, 0]


def test_a_cached_sum_gives_the_bits_of_a_new_one(tmp_path):
    path = write_random_model(tmp_path / "m.bin", ["</s>", "the", "mill"], ["de", "en"], 3, (1, 3), 2)
    texts = TextBuffer.of(["the mill", "mill flour the", "a" * 24, "a" * 25, "a" * 16, "the </s> mill", "x\0y the"])
    used, other = (prepare(read_fasttext(path)) for _ in range(2))
    predict(texts, used, 100, False)
    assert np.count_nonzero(token_cache(used).keys[:, 0]) == 7  # the, mill, flour, a * 24, a * 16, x, y
    second = predict(texts, used, 100, False)
    for k, text in enumerate(texts.texts()):  # the cache of another model is new
        alone = predict(TextBuffer.of([text]), other._replace(), 100, False)
        assert (alone[0][0], alone[1][0]) == (second[0][k], second[1][k])


@pytest.mark.parametrize("size", [0, 9, 60, 100, 150, 400])
def test_a_model_that_is_cut_off_is_refused(tmp_path, size):
    path = write_random_model(tmp_path / "m.bin", ["</s>", "the"], ["de", "en"], 1, (2, 4), 1)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError):
        read_fasttext(cut)


@given(st.data())
def test_a_damaged_model_is_refused_or_reads_nothing_behind_its_arrays(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = write_random_model(folder / "m.bin", ["</s>", "the"], ["de", "en"], 1, (2, 4), 2)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(8, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        model = prepare(read_fasttext(path))
    except (ValueError, MemoryError, OverflowError):
        return
    labels, _ = predict(TextBuffer.of(["the mill", "mühle"]), model, 100, False)
    assert all(NO_LABEL <= label < 2 for label in labels.tolist())


def test_a_damaged_model_is_named(tmp_path):
    path = write_random_model(tmp_path / "m.bin", ["</s>", "the"], ["de", "en"], 1, (2, 4), 1)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match=r"m\.bin: the fastText model cannot be loaded .*download the model again"):
        load_model(str(path))
