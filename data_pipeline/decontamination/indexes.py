"""The indexes of the benchmark texts: made once, saved, and loaded by every worker that searches documents."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.edits import EditIndex, build_edits
from gristmill.data_pipeline.decontamination.index import NgramIndex, build_index
from gristmill.data_pipeline.decontamination.kernels import SearchedTexts, SeedTable
from gristmill.data_pipeline.decontamination.words import words_of
from gristmill.data_pipeline.dedup.arrays import load_array, save_array


@dataclass(frozen=True)
class Indexes:
    ngrams: NgramIndex
    edits: EditIndex

    @property
    def searched(self) -> np.ndarray:
        """bool[texts]: which texts are searched for in any way."""
        return (self.ngrams.ngrams_of > 0) | self.edits.edited | self.edits.short


def build_indexes(examples: Sequence[Example], config: DecontaminateConfig) -> Indexes:
    words = words_of([example.text for example in examples])
    return Indexes(build_index(words, config.ngram, config.min_ngram), build_edits(examples, words, config))


def save_indexes(indexes: Indexes, folder: Path) -> None:
    """One .npy file an array in the folder; those that stand there are kept."""
    for name, value in _arrays(indexes).items():
        path = folder / f"index-{name}.npy"
        if not path.exists():
            save_array(path, np.asarray(value))


def load_indexes(folder: Path) -> Indexes:
    ngrams: Any = {field.name: _loaded(folder, field.name) for field in fields(NgramIndex)}
    seeds: Any = [_loaded(folder, f"seeds-{name}") for name in SeedTable._fields]
    texts: Any = [_loaded(folder, f"texts-{name}") for name in SearchedTexts._fields]
    flags: Any = [_loaded(folder, f"edits-{name}") for name in ("edited", "short")]
    return Indexes(NgramIndex(**ngrams), EditIndex(SeedTable(*seeds), SearchedTexts(*texts), *flags))


def _arrays(indexes: Indexes) -> dict[str, Any]:
    edits = indexes.edits
    return {
        **{field.name: getattr(indexes.ngrams, field.name) for field in fields(NgramIndex)},
        **{f"seeds-{name}": value for name, value in edits.seeds._asdict().items()},
        **{f"texts-{name}": value for name, value in edits.texts._asdict().items()},
        "edits-edited": edits.edited,
        "edits-short": edits.short,
    }


def _loaded(folder: Path, name: str) -> Any:
    """The array; a number where it is one."""
    value = load_array(folder / f"index-{name}.npy")
    return value if value.ndim else int(value)
