"""The n-gram model: equal to a plain reading of its rule, a distribution, and what is no such model."""

from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save_file

from gristmill.data_pipeline.quality.ngram_lm import DISCOUNT, VOCABULARY, fit_ngram_model, load_ngram_model
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.foundation.errors import InputError
from tests.support.corpora import prose

TEXTS = [prose(k).replace(".", "").lower() for k in range(12)]


class PlainModel:
    """Interpolated absolute discounting by dictionaries of words; n-grams of two and more that occur once are left
    out."""

    def __init__(self, texts: list[str]):
        self.counts: Counter[tuple[str, ...]] = Counter()
        for text in texts:
            words = text.split()
            for size in (1, 2, 3):
                self.counts.update(tuple(words[k : k + size]) for k in range(len(words) - size + 1))
        self.words = sum(count for gram, count in self.counts.items() if len(gram) == 1)
        self.known = sum(len(gram) == 1 for gram in self.counts)

    def probability(self, gram: tuple[str, ...]) -> float:
        if len(gram) == 1:
            unknown = DISCOUNT * self.known / self.words / VOCABULARY
            return unknown + max(self.counts[gram] - DISCOUNT, 0) / self.words
        continued = {g: c for g, c in self.counts.items() if len(g) == len(gram) and g[:-1] == gram[:-1]}
        if not any(count > 1 for count in continued.values()):
            return self.probability(gram[1:])
        total = sum(continued.values())
        left = 1 - sum(count - DISCOUNT for count in continued.values() if count > 1) / total
        own = (self.counts[gram] - DISCOUNT) / total if self.counts[gram] > 1 else 0.0
        return own + left * self.probability(gram[1:])

    def score(self, text: str) -> float:
        words = text.split()
        return float(
            np.mean([np.log2(self.probability(tuple(words[max(k - 2, 0) : k + 1]))) for k in range(len(words))])
        )


def test_scores_are_those_of_the_plain_model():
    model, plain = fit_ngram_model(TEXTS, 3), PlainModel(TEXTS)
    texts = [TEXTS[0], "the water of unknownword and stone", prose(99).replace(".", "").lower(), "river river river"]
    assert model.scores(TextBuffer.of(texts)) == pytest.approx([plain.score(text) for text in texts], abs=1e-4)
    assert np.isnan(model.scores(TextBuffer.of(["", " \n"]))).all()


def test_probabilities_of_all_words_sum_to_one():
    plain = PlainModel(TEXTS)
    words = [gram[0] for gram in plain.counts if len(gram) == 1]
    unknown = DISCOUNT * plain.known / plain.words / VOCABULARY
    rest = unknown * (VOCABULARY - plain.known)
    for context in (("the",), ("river", "stone")):
        backed_off = plain.probability((*context, "unknownword")) / unknown
        total = sum(plain.probability((*context, word)) for word in words) + rest * backed_off
        assert total == pytest.approx(1)


def test_text_like_the_training_text_is_likelier_and_the_file_keeps_the_scores(tmp_path):
    model = fit_ngram_model(TEXTS, 3)
    model.save(tmp_path / "lm.safetensors")
    fit_ngram_model(TEXTS[::-1], 3).save(tmp_path / "other.safetensors")
    assert (tmp_path / "lm.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    texts = TextBuffer.of([TEXTS[3], " ".join(reversed(TEXTS[3].split())), "xq zv wk"])
    scores = load_ngram_model(tmp_path / "lm.safetensors").scores(texts)
    assert scores.tolist() == model.scores(texts).tolist() and scores[0] > scores[1] > scores[2]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="3 tokens in 1 documents; an n-gram model needs 1000"):
        fit_ngram_model(["a b c"], 3)
    save_file({"keys": np.zeros(4, np.uint64)}, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="the n-gram model cannot be read"):
        load_ngram_model(tmp_path / "m.safetensors")
    model = fit_ngram_model(TEXTS, 2)
    full = model.table._replace(keys=np.ones(len(model.table.keys), np.uint64))  # a search would not end
    type(model)(full, 2, model.unknown).save(tmp_path / "full.safetensors")
    with pytest.raises(InputError, match="do not describe an n-gram model"):
        load_ngram_model(tmp_path / "full.safetensors")
