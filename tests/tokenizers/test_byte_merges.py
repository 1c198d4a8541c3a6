"""Training byte-level BPE: the merges of Hugging Face's trainer, room that grows, and merges across spaces."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from gristmill.foundation.errors import InputError
from gristmill.tokenizers import train_tokenizer as training
from gristmill.tokenizers.byte_level import BYTE_OF, bytes_to_unicode
from gristmill.tokenizers.byte_merges import MergeTrainer
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.pretrained import write_json
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer, load_tokenizer
from gristmill.tokenizers.train_tokenizer import ALPHABET, END_OF_DOCUMENT, train_byte_level, trained_merges
from gristmill.tokenizers.word_counts import count_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def by_hugging_face(words: Counter[str], vocab_size: int) -> list[list[str]]:
    """Merges of words in visible characters; a word stands as often as it is counted."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(BYTE_OF), show_progress=False)
    tokenizer.train_from_iterator([f"{word} " * count for word, count in words.items()], trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"]


def as_ids(words: Counter[str]) -> training.Words:
    ids = {bytes_to_unicode(token): number for number, token in enumerate(ALPHABET)}
    return Counter({tuple(ids[character] for character in word): count for word, count in words.items()})


@pytest.mark.parametrize("seed", range(12))
def test_random_words_give_the_merges_of_hugging_face(seed):
    rng = random.Random(seed)
    letters = "ab" if seed % 3 == 0 else "abcdefgh"
    words = Counter({"".join(rng.choices(letters, k=rng.randint(1, 12))): rng.randint(1, 9) for _ in range(200)})
    merges, tokens = trained_merges(as_ids(words), ALPHABET, 256 + 150)
    assert merges == by_hugging_face(words, 256 + 150)
    assert len(tokens) == len(set(tokens))


def test_text_gives_the_merges_of_hugging_face(training_texts):
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(word for text in training_texts for word, _ in splitter.pre_tokenize_str(text))
    assert trained_merges(as_ids(words), ALPHABET, 1500)[0] == by_hugging_face(words, 1500)


def test_the_merges_do_not_depend_on_the_room_there_is(training_texts):
    words = as_ids(
        Counter(word for text in training_texts[:20] for word in text.encode("ascii", "ignore").decode().split())
    )
    expected = trained_merges(words, ALPHABET, 600)[0]
    ordered = sorted(words)
    starts = np.concatenate([[0], np.cumsum([len(word) for word in ordered])])
    trainer = MergeTrainer(
        np.array([symbol for word in ordered for symbol in word]),
        starts,
        np.array([words[w] for w in ordered]),
        ALPHABET,
    )
    sizes = []
    grow = trainer._grow
    trainer._grow = lambda needed: (sizes.append(needed), grow(needed))
    pairs = len({pair for word in words for pair in itertools.pairwise(word)})
    trainer._pairs = tuple(array[: pairs + 8] for array in trainer._pairs)
    trainer._heap = trainer._heap[: pairs + 8]
    assert len(trainer.train(600)) == len(expected)
    assert sizes


@pytest.fixture(scope="module")
def folders(training_texts, tmp_path_factory):
    """(plain, with a fifth of the merges across spaces): tokenizer folders of 1,500 tokens."""
    made = []
    for share in (0.0, 0.2):
        config = TokenizerConfig(algorithm="byte_bpe", vocab_size=1500, superwords=share, fim=True)
        folder = tmp_path_factory.mktemp("byte_bpe")
        content = train_byte_level(count_texts(training_texts, byte_level=True), training_texts, config)
        write_json(folder, content, END_OF_DOCUMENT)
        made.append(folder)
    return made


@pytest.mark.parametrize("place", [0, 1])
def test_every_text_comes_back_and_the_fast_encoder_is_equal(folders, held_out_texts, place):
    tokenizer, bulk = load_tokenizer(folders[place]), load_bulk_tokenizer(folders[place])
    assert tokenizer.vocab_size == 1500
    assert tokenizer.fim_ids() is not None
    assert bulk.encoder == ("gigatoken", "tiktoken")[place]
    for text in held_out_texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert bulk.encode_batch(held_out_texts) == tokenizer.encode_batch(held_out_texts)


def test_merges_across_spaces_make_fewer_tokens(folders, held_out_texts):
    plain, superwords = (load_tokenizer(folder) for folder in folders)
    across = [piece for piece in superwords.pieces if "Ġ" in piece[1:].lstrip("Ġ")]
    assert len(across) > 30
    assert not [piece for piece in plain.pieces if "Ġ" in piece[1:].lstrip("Ġ")]
    tokens = [sum(map(len, tokenizer.encode_batch(held_out_texts))) for tokenizer in (plain, superwords)]
    assert tokens[1] < tokens[0]


def test_the_same_text_gives_the_same_bytes(training_texts):
    config = TokenizerConfig(algorithm="byte_bpe", vocab_size=600, superwords=0.3)
    made = {
        train_byte_level(count_texts(texts, byte_level=True), sorted(texts), config)
        for texts in (training_texts, training_texts[::-1])
    }
    assert len(made) == 1


def test_what_cannot_be_trained_is_refused_with_the_fix():
    config = TokenizerConfig(algorithm="byte_bpe", vocab_size=600)
    with pytest.raises(InputError, match=r"gives 2\d\d of 599 tokens; set a smaller one"):
        train_byte_level(count_texts(["a few words"], byte_level=True), [], config)
    with pytest.raises(ValidationError, match="superwords are merges of byte_bpe; set algorithm: byte_bpe"):
        TokenizerConfig(superwords=0.2)
    with pytest.raises(ValidationError, match="algorithm=byte_bpe has no user_symbols; drop it"):
        TokenizerConfig(algorithm="byte_bpe", user_symbols=("<br>",))
