"""Masked language modelling: worked examples of words and masks, and the statistics of 100,000 tokens."""

from typing import Any

import numpy as np
import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.masked import Masked, MaskedOptions, choose_masked, word_starts, words_of
from gristmill.training.objectives.objective import ObjectiveInputs, TermSpec
from tests.support.parity import MODELS
from tests.support.synthetic_pairs import PIECES, VOCAB, SyntheticPairs, masked_inputs

PAD, CLS, SEP, MASK = range(4)


def model(length: int, **changes: Any) -> ModelConfig:
    tiny = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 2, "sequence_length": length}
    return ModelConfig(**(MODELS["bert"] | tiny | changes))


def test_words_of_three_kinds_of_pieces() -> None:
    assert word_starts(["▁mask", "ing", "▁"]).tolist() == [True, False, True]
    assert word_starts(["mask", "##ing", "[CLS]"]).tolist() == [True, False, True]
    assert word_starts(["Ġmask", "ing"]).tolist() == [True, False]
    assert word_starts(["a", "b"]).tolist() == [True, True]


def test_words_by_hand() -> None:
    begins, special = np.array([1, 1, 0, 1, 1, 0, 1], bool), np.array([1, 0, 0, 0, 1, 0, 0], bool)
    assert words_of(begins, special).tolist() == [[1, 3], [3, 4], [5, 6], [6, 7]]


def test_masks_are_whole_words_within_the_budget() -> None:
    words = np.array([[1, 3], [3, 4], [5, 9], [9, 10], [10, 12]])
    lone = {tuple(range(start, stop)) for start, stop in words.tolist()}
    for seed in range(200):
        places = choose_masked(words, 4, 1, np.random.default_rng(seed))
        assert len(places) == 4  # 4, 2 + 2 or 2 + 1 + 1
        taken = [word for word in lone if set(word) <= set(places.tolist())]
        assert sum(map(len, taken)) == len(places)


def test_a_text_of_long_words_has_one_mask() -> None:
    """Two short sentences whose words all have more pieces than may be masked: one of the shortest words is masked."""
    words = np.array([[1, 4], [4, 6], [7, 9]])
    drawn = {tuple(choose_masked(words, 1, 3, np.random.default_rng(seed)).tolist()) for seed in range(50)}
    assert drawn == {(4, 5), (7, 8)}
    assert choose_masked(words[:0], 1, 3, np.random.default_rng(0)).tolist() == []


def test_shares_of_masked_tokens_are_at_most_all() -> None:
    with pytest.raises(ValueError, match="lower one"):
        MaskedOptions(random_share=0.6, keep_share=0.5)


def test_a_sample_by_hand() -> None:
    """Eight tokens, as docs/objectives.md has them."""

    class One:
        vocab_size = VOCAB

        def pair(self, k: int) -> Any:
            return SyntheticPairs(5).pair(0).__class__(np.array([4, 5]), np.array([7]), swapped=True)

    inputs = ObjectiveInputs(One(), model(8), VOCAB, 0, seed=1, pieces=PIECES)
    sample = Masked(inputs, MaskedOptions(keep_share=0, random_share=0)).sample(0)
    assert sample["targets"].tolist() == [CLS, 4, 5, SEP, 7, SEP, PAD, PAD]
    assert sample["segments"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert sample["documents"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert sample["swapped"] == 1
    masked = sample["weights"] == 1
    assert masked.sum() == 1  # round(0.15 x 3) is 0, and at least one token is masked
    assert (sample["tokens"][masked] == MASK).all()
    assert (sample["tokens"][~masked] == sample["targets"][~masked]).all()


def test_statistics_of_100_000_tokens() -> None:
    length = 512
    objective = Masked(masked_inputs(model(length)), MaskedOptions(whole_words=False, max_ngram=1))
    tokens, masked, kept, replaced, swapped = 0, 0, 0, 0, 0
    samples = [objective.sample(k) for k in range(500)]
    for sample in samples:
        chosen = sample["weights"] == 1
        tokens += int((sample["documents"] == 0).sum()) - 3
        masked += int(chosen.sum())
        kept += int((sample["tokens"][chosen] == sample["targets"][chosen]).sum())
        replaced += int((sample["tokens"][chosen] == MASK).sum())
        swapped += int(sample["swapped"])
    assert tokens > 100_000
    assert masked / tokens == pytest.approx(0.15, abs=0.002)
    # a random token is the same one, or [MASK], with chance 1/51
    assert kept / masked == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.01)
    assert replaced / masked == pytest.approx(0.8 + 0.1 / VOCAB, abs=0.014)  # 6 deviations of 16,000 draws: 0.019
    assert swapped == 250


def test_the_sample_is_a_function_of_k_alone() -> None:
    one, other = (Masked(masked_inputs(model(64)), MaskedOptions()) for _ in range(2))
    for k in (5, 2, 5):
        first, second = one.sample(k), other.sample(k)
        assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(one.sample(1)["tokens"], one.sample(3)["tokens"])


def test_its_terms() -> None:
    loss = checked_loss(Masked(masked_inputs(model(16)), MaskedOptions()))
    assert loss.terms == (TermSpec("masked_tokens", "weights", 1.0), TermSpec("sentence_order", None, 1.0))


def test_what_it_lacks_is_named() -> None:
    inputs = masked_inputs(model(16))
    with pytest.raises(RecipeError, match=r"has no piece '<mask>'; add it to tokenizer\.user_symbols"):
        make_objective("masked", {"mask": "<mask>"}, inputs)
    with pytest.raises(RecipeError, match="has no output 'sentence_order'"):
        checked_loss(Masked(masked_inputs(model(16, outputs=())), MaskedOptions()))
    with pytest.raises(RecipeError, match=r"train\.objective_options\.mask_rate"):
        make_objective("masked", {"mask_rate": 1.5}, inputs)
