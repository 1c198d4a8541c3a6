"""Mutated .idx and .bin files: an error or the same tokens; never a crash, never much memory.

Run one mutant alone: `check(folder, name, number)` with the number that a failure prints."""

import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import (
    DATASET_NAME,
    Dataset,
    IndexedSource,
    SplitCounts,
    merge,
    source_prefix,
    write_dataset,
)
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.indexed.inspect import inspect
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.foundation import files
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import StageIdentity, write_manifest
from tests.support.indexed_files import write_documents
from tests.support.mutations import mutate

SEED = 12
VOCABULARY, END = 1000, 1
IN_CI, SLOW = 1_600, 300_000
PACKINGS = ("concat", "best_fit")
MEMORY_BYTES = 200 * 1024 * 1024  # growth over all mutants: a length of 2^31 - 1 believed once would be 4 GB


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """Two index folders of the same 30 documents: `sealed` with its manifest, `plain` without. In memory where the
    machine offers it, and nothing is forced to disk: no machine fails here."""
    monkeypatch.setattr(files, "sync", lambda path: None)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        sealed, plain = Path(name) / "sealed", Path(name) / "plain"
        rng = np.random.default_rng(SEED)
        documents = [[*rng.integers(10, VOCABULARY, rng.integers(1, 12)), END] for _ in range(30)]
        write_documents(source_prefix(sealed, "train", "books"), documents, np.uint16, VOCABULARY)
        tokens = sum(map(len, documents))
        counts = SplitCounts(documents=30, tokens=tokens, bytes=tokens, sha256="")
        source = IndexedSource(name="books", weight=1.0, tokenizer="t", splits={"train": counts})
        write_dataset(
            sealed, Dataset(vocab_size=VOCABULARY, end_of_document=END, dtype="uint16", fim=None, sources=(source,))
        )
        plain.mkdir()
        shutil.copyfile(sealed / DATASET_NAME, plain / DATASET_NAME)
        (plain / "train").symlink_to(sealed / "train")
        write_manifest(sealed, StageIdentity("index", 1), {}, {})
        yield Path(name)


def all_samples(folder: Path, packing: str) -> list[list[int]]:
    samples = open_samples(folder, "train", 8, 0, IndexConfig(packing=packing))
    return [samples.sample(k)["tokens"].tolist() for k in range(samples.samples_of("books"))]


def outcome(call) -> object:
    """What the call gave, or the message it refused with; anything else than InputError is a crash of ours."""
    try:
        return call()
    except InputError as error:
        assert "books" in str(error) and len(str(error)) < 1000
        return None


class Case:
    """Folders whose files are mutated one after another, and what the undamaged files hold."""

    def __init__(self, folder: Path):
        self.sealed, self.plain = folder / "sealed", folder / "plain"
        self.prefix, self.merged = source_prefix(self.sealed, "train", "books"), folder / "books-merged"
        self.whole = {name: self.path(name).read_bytes() for name in ("books.idx", "books.bin")}
        self.tokens = IndexedReader(self.prefix).tokens.tolist()
        self.samples = {packing: all_samples(self.sealed, packing) for packing in PACKINGS}
        self.refused = 0

    def path(self, name: str) -> Path:
        return self.sealed / "train" / name

    def check(self, name: str, number: int) -> None:
        """Mutant `number` of the file, on every path."""
        mutant = mutate(self.whole[name], np.random.default_rng([SEED, number]))
        packing = PACKINGS[number // 4 % 2]
        self.path(name).write_bytes(mutant)
        try:
            if mutant == self.whole[name]:
                assert all_samples(self.sealed, packing) == self.samples[packing]
                return
            with pytest.raises(InputError, match="books"):
                all_samples(self.sealed, packing)
            self.check_reader(name)
            found = outcome(lambda: all_samples(self.plain, packing))
            if name == "books.idx" and packing == "concat":  # best_fit may pack other documents of the same tokens
                assert found in (None, self.samples["concat"])
        finally:
            self.path(name).write_bytes(self.whole[name])

    def check_reader(self, name: str) -> None:
        """Every path refuses what the reader refuses; from an .idx that it takes it reads the tokens as they were."""
        reader = outcome(lambda: IndexedReader(self.prefix))
        if not isinstance(reader, IndexedReader):
            self.refused += 1
            for look in (inspect, lambda prefix: merge([prefix], self.merged)):
                with pytest.raises(InputError, match="books"):
                    look(self.prefix)
            return
        outcome(lambda: inspect(self.prefix))
        outcome(lambda: merge([self.prefix], self.merged))
        if name == "books.idx" and reader.dtype == np.uint16:
            assert reader.tokens.tolist() == self.tokens
            assert [token for document in reader.documents() for token in document.tolist()] == self.tokens


def fuzz(folder: Path, count: int) -> None:
    case = Case(folder)
    case.check("books.idx", 0)  # what is loaded once is not counted as growth
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for number in range(count):
        name = "books.bin" if number % 4 == 0 else "books.idx"
        try:
            case.check(name, number)
        except BaseException:
            print(f"mutant {number} of {name}, seed {SEED}")
            raise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MEMORY_BYTES
    assert case.refused > count // 2  # the mutations reach the checks


def test_mutants_are_refused_or_read_as_the_same_tokens(folder):
    fuzz(folder, IN_CI)


@pytest.mark.slow
def test_mutants_of_a_long_run_are_refused_or_read_as_the_same_tokens(folder):
    fuzz(folder, SLOW)
