"""Which documents are held out: a pure function of a document's text and the seed."""

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.foundation.fingerprint import INCREMENT, mix_array

SPLITS = ("train", "validation", "test")


class SplitConfig(Config):
    """Shares of the documents held out. Which ones is decided by a hash of the text, so a document stays on its side
    when sources grow, move or are reordered, and equal texts are never on two sides."""

    validation: float = Field(default=0.01, ge=0, lt=1)
    test: float = Field(default=0.01, ge=0, lt=1)

    @model_validator(mode="after")
    def leaves_training(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation={self.validation} and test={self.test} leave no training text; lower them")
        return self


def one_split(hashes_N: np.ndarray, split: str) -> np.ndarray:
    """int8[N]: the index of this split for each document, as split_indices gives them."""
    return np.full(len(hashes_N), SPLITS.index(split), np.int8)


def split_indices(hashes_N: np.ndarray, config: SplitConfig, seed: int) -> np.ndarray:
    """int8[N]: the index into SPLITS of each document, from the uint64 hash of its text.

    The hash is mixed with the seed (SplitMix64), so another seed holds out other documents."""
    with np.errstate(over="ignore"):
        mixed = mix_array(hashes_N.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(INCREMENT))
    at = mixed.astype(np.float64) / 2.0**64
    return np.where(at < config.validation, 1, np.where(at < config.validation + config.test, 2, 0)).astype(np.int8)
