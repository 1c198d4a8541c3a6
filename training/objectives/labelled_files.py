"""Labelled records in JSON lines, and how texts become the tokens of a sample: for objectives that fine-tune."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import fingerprint
from gristmill.training.objectives.objective import Objective, ObjectiveInputs
from gristmill.training.objectives.objective_names import RECORD_FILES, Located, read_records, records_digest


class LabelledFilesOptions(Config):
    """train, validation, test: files of records, or folders of such files (`objective_names.py`). test defaults to the
    validation records, these to the training records."""

    train: Path
    validation: Path | None = None
    test: Path | None = None
    start: str = Field("[CLS]", description="piece that begins a sample")
    separator: str = Field("[SEP]", description="piece that ends each text")
    padding: str = Field("[PAD]", description="piece that fills a sample up")

    def split_path(self, split: str) -> Path:
        paths = {"train": self.train, "validation": self.validation or self.train}
        return paths.get(split) or self.test or paths["validation"]


class LabelledFiles(Objective):
    """Sample k is record k: of training records in an order shuffled anew in each epoch. A subclass makes `fields`."""

    Options = LabelledFilesOptions
    data = "own"

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        self.path = options.split_path(inputs.split)
        self.records = self.parsed_records(self.path, options)
        self.digest = records_digest(self.path)
        self.start, self.separator, self.padding = (inputs.id_of(name) for name in self.pieces(options))

    @classmethod
    def pieces(cls, options: Any) -> Sequence[str]:
        return options.start, options.separator, options.padding

    @classmethod
    def check_records(cls, options: Any) -> None:
        for path in dict.fromkeys(options.split_path(split) for split in RECORD_FILES):
            cls.parsed_records(path, options)

    @classmethod
    def parsed_records(cls, path: Path, options: Any) -> list[Any]:
        """As `parsed` has them. Raises InputError, with file and line, on the first wrong one."""
        parsed = [
            cls.parsed(*expanded, options) for located in read_records(path) for expanded in cls.expanded(*located)
        ]
        kept = [record for record in parsed if record is not None]
        if not kept:
            raise InputError(f"{path}: no record is left; name a file with records that are not left out")
        return kept

    @classmethod
    def expanded(cls, record: dict[str, Any], where: str) -> list[Located]:
        """The records that one line holds; itself by default."""
        return [(record, where)]

    @classmethod
    def parsed(cls, record: dict[str, Any], where: str, options: Any) -> Any:
        """The record as `fields` takes it, None for one that is left out. Raises InputError, beginning with `where`, on
        a wrong one."""
        raise NotImplementedError

    def fields(self, record: Any) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def sample(self, k: int) -> dict[str, np.ndarray]:
        return self.fields(self.record(k))

    def record(self, k: int) -> Any:
        epoch, index = divmod(k, len(self.records))
        if self.inputs.split == "train":
            index = Permutation(len(self.records), key_of(self.inputs.seed, "records", epoch))(index)
        return self.records[index]

    def encode(self, text: str) -> list[int]:
        assert self.inputs.encode is not None
        return self.inputs.encode(text)

    def packed(self, parts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        return packed(parts, self.inputs.model.sequence_length, self.start, self.separator, self.padding)

    @property
    def num_samples(self) -> int | None:
        return len(self.records)

    @property
    def fingerprint(self) -> str:
        return fingerprint([super().fingerprint, self.digest])

    def source_of(self, k: int) -> str:
        return "all"


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """Raises InputError if the record has no text of that name."""
    if not isinstance(record.get(field), str):
        raise InputError(
            f"{where}: no text {field!r}, the fields are {sorted(record)}; correct the line, or name the field in "
            "train.objective_options"
        )
    return record[field]


def packed(
    parts: Sequence[Sequence[int]], length: int, start: int, separator: int, padding: int
) -> dict[str, np.ndarray]:
    """[start] parts with a separator after each, padding: tokens, segments and documents (1 is padding), int64[length].

    The longest part loses tokens at its end until all fit."""
    cut = [list(part) for part in parts]
    surplus = sum(map(len, cut)) + len(cut) + 1 - length
    while surplus > 0:
        longest = max(cut, key=len)
        others = [len(part) for part in cut if part is not longest]
        removed = min(surplus, max(1, len(longest) - max(others, default=0)))
        del longest[len(longest) - removed :]
        surplus -= removed
    tokens, segments = [start], [0]
    for number, part in enumerate(cut):
        tokens += [*part, separator]
        segments += [number] * (len(part) + 1)
    missing = length - len(tokens)
    return {
        "tokens": np.array(tokens + [padding] * missing, dtype=np.int64),
        "segments": np.array(segments + [0] * missing, dtype=np.int64),
        "documents": np.array([0] * len(tokens) + [1] * missing, dtype=np.int64),
    }
