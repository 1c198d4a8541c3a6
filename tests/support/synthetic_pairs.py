"""Random pairs of text segments, and the masked objective on them."""

import numpy as np

from gristmill.data_pipeline.indexed.sentence_pairs import Pair
from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.masked import SPECIAL_TOKENS, Masked, MaskedOptions
from gristmill.training.objectives.objective import LossFunction, ObjectiveInputs

VOCAB = 51
PIECES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"{'▁' * (k % 3 > 0)}{k}" for k in range(4, VOCAB)))


class SyntheticPairs:
    """Pair k has 2 to max_tokens tokens; the second segment repeats the first one's tokens plus 1, so it can be
    learned."""

    vocab_size, fingerprint, end_of_document = VOCAB, "pairs", 0

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens

    def pair(self, k: int) -> Pair:
        generator = np.random.default_rng(k)
        first = np.full(int(generator.integers(1, self.max_tokens // 2 + 1)), generator.integers(4, VOCAB - 1))
        second = np.full(int(generator.integers(1, self.max_tokens // 2 + 1)), first[0] + 1)
        return Pair(second, first, True) if k % 2 else Pair(first, second, False)

    def source_of(self, k: int) -> str:
        return "all"


def masked_inputs(model: ModelConfig) -> ObjectiveInputs:
    pairs = SyntheticPairs(model.sequence_length - SPECIAL_TOKENS)
    return ObjectiveInputs(pairs, model, VOCAB, 0, seed=5, pieces=PIECES)


def masked_loss(model: ModelConfig) -> LossFunction:
    return checked_loss(Masked(masked_inputs(model), MaskedOptions(mask_rate=0.4)), z_loss=1e-2)
