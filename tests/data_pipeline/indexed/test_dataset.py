"""Index files are checked before they are read, and not again until they change."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline.indexed import dataset
from gristmill.data_pipeline.indexed import packing as packing_table
from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import DATASET_NAME
from gristmill.data_pipeline.indexed.samples import TooFewTokens, open_samples
from gristmill.foundation.checksums import write_cached
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import StageIdentity, read_manifest, write_manifest

PACKINGS = ("concat", "best_fit")


@pytest.fixture
def folder(make_dataset, random_documents) -> Path:
    """An index folder with a manifest, as its stage leaves it, and settled: its files seem an hour old."""
    folder = make_dataset({"books": (1.0, random_documents(0, 40, 20))})
    write_manifest(folder, StageIdentity("index", 1), {}, {})
    settle(folder)
    return folder


@pytest.fixture(autouse=True)
def an_hour_later(monkeypatch):
    """Times of change cannot be set back, so the clock that judges their age is set forward."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)


@pytest.fixture
def digested(monkeypatch) -> list[str]:
    """Names of the files that were read whole for their digest."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(dataset, "file_digest", counted)
    return names


def settle(folder: Path) -> None:
    for path in (folder / "train").iterdir():
        os.utime(path, ns=(10**18, 10**18))


def opened(folder: Path, packing: str = "concat"):
    return open_samples(folder, "train", 16, 7, IndexConfig(packing=packing))


def tokens_of(samples) -> list[list[int]]:
    return [samples.sample(k)["tokens"].tolist() for k in range(samples.samples_of("books"))]


def flip(path: Path, place: int) -> None:
    """Another bit, equal size and equal time of the last write."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_second_start_reads_no_file_whole(folder, digested):
    opened(folder)
    assert sorted(digested) == ["books.bin", "books.idx", DATASET_NAME]
    digested.clear()
    opened(folder)
    assert digested == [DATASET_NAME]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("name", "place"), [("books.bin", 0), ("books.bin", -1), ("books.idx", 36), ("books.idx", -6)])
def test_a_file_altered_with_equal_size_and_time_is_refused_after_any_number_of_starts(folder, packing, name, place):
    opened(folder, packing)
    opened(folder, packing)
    flip(folder / "train" / name, place)
    for _ in range(2):
        with pytest.raises(InputError, match=rf"{name}.* (again|restore)"):
            opened(folder, packing)
    flip(folder / "train" / name, place)
    opened(folder, packing)


def test_an_altered_bin_is_refused_by_its_digest(folder):
    flip(folder / "train" / "books.bin", 0)
    with pytest.raises(
        InputError, match=r"books\.bin: its sha256 is not the one in .*manifest\.json, so it was altered"
    ):
        opened(folder)


def test_a_file_replaced_by_another_of_equal_size_and_time_is_read_again(folder, digested):
    opened(folder)
    path = folder / "train" / "books.bin"
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(10**18, 10**18))
    other.rename(path)
    digested.clear()
    opened(folder)
    assert sorted(digested) == ["books.bin", "books.idx", DATASET_NAME]


def test_an_altered_description_or_manifest_is_not_taken_for_the_old_one(folder, digested):
    opened(folder)
    path = folder / DATASET_NAME
    path.write_text(path.read_text().replace('"vocab_size":1000', '"vocab_size":1001'))
    with pytest.raises(InputError, match=r"dataset\.json: its sha256 is not the one in .*restore"):
        opened(folder)
    write_manifest(folder, StageIdentity("index", 1), {}, {})  # now of another vocabulary, so ids are checked again
    digested.clear()
    opened(folder)
    assert "books.bin" in digested


def test_files_written_a_moment_ago_are_not_remembered(folder, monkeypatch, digested):
    """Their next change might fall into the same tick of the clock and not show."""
    monkeypatch.undo()
    monkeypatch.setattr(dataset, "file_digest", lambda path: digested.append(path.name) or file_digest(path))
    opened(folder)
    assert not (folder / "cache" / "checked").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_record_is_as_good_as_none(folder, digested, content):
    opened(folder)
    record = folder / "cache" / "checked" / "train" / "books.json"
    whole = record.read_bytes()
    record.write_bytes(content)
    digested.clear()
    opened(folder)
    assert "books.bin" in digested
    assert record.read_bytes() == whole


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_folder_that_cannot_be_written_is_checked_at_every_start(folder, digested, packing):
    (folder / "cache").write_bytes(b"a file where the folder would be")
    first, again = opened(folder, packing), opened(folder, packing)
    assert digested.count("books.bin") == 2
    assert tokens_of(first) == tokens_of(again)


def test_what_is_remembered_is_in_no_manifest(folder):
    before = read_manifest(folder).outputs
    opened(folder, "best_fit")
    assert (folder / "cache" / "checked").is_dir() and (folder / "cache" / "best_fit").is_dir()
    assert write_manifest(folder, StageIdentity("index", 1), {}, {}).outputs == before


@pytest.mark.parametrize("packing", PACKINGS)
def test_without_a_manifest_tables_and_ids_are_checked_once(make_dataset, random_documents, packing):
    folder = make_dataset({"books": (1.0, random_documents(0, 40, 20))})
    opened(folder, packing)
    assert (folder / "cache" / "checked" / "train" / "books.json").is_file()
    path = folder / "train" / "books.bin"
    content = np.frombuffer(path.read_bytes(), "<u2").copy()
    content[5] = 1000
    path.write_bytes(content.tobytes())
    with pytest.raises(InputError, match=r"\(source 'books'\): document \d, token \d has id 1000; .* ids 0 to 999"):
        opened(folder, packing)


def test_an_id_outside_the_vocabulary_is_named_though_the_digest_is_wrong_too(folder):
    path = folder / "train" / "books.bin"
    path.write_bytes(b"\xff\xff" + path.read_bytes()[2:])
    with pytest.raises(InputError, match=r"document 0, token 0 has id 65535"):
        opened(folder)


def test_a_damaged_split_is_not_one_with_too_few_tokens(make_dataset, random_documents):
    folder = make_dataset({"books": (1.0, random_documents(0, 40, 20))}, split="validation")
    path = folder / "validation" / "books.idx"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError) as error:
        open_samples(folder, "validation", 16, 7, IndexConfig())
    assert not isinstance(error.value, TooFewTokens)


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    """Contexts for which documents were packed anew."""
    contexts: list[int] = []
    whole = packing_table.first_windows
    monkeypatch.setattr(
        packing_table,
        "first_windows",
        lambda reader, sequence_length: contexts.append(sequence_length) or whole(reader, sequence_length),
    )
    return contexts


def test_best_fit_packs_once_and_draws_the_same_samples(folder, packed):
    drawn = [tokens_of(opened(folder, "best_fit")) for _ in range(3)]
    assert packed == [16]
    assert drawn[0] == drawn[1] == drawn[2]
    open_samples(folder, "train", 8, 7, IndexConfig(packing="best_fit"))
    assert packed == [16, 8]


@pytest.mark.parametrize("damage", ["flip", "short", "long", "empty", "of another file"])
def test_a_damaged_table_is_built_again(folder, packed, damage):
    drawn = tokens_of(opened(folder, "best_fit"))
    (table,) = (folder / "cache" / "best_fit").iterdir()
    whole = table.read_bytes()
    other = packing_table.table_path(folder, "other", 16)
    packing_table.write_table(other, np.array([0, 3]))
    changes = {"flip": bytes([*whole[:-1], whole[-1] ^ 1]), "short": whole[:-1], "long": whole + b"\0" * 8}
    table.write_bytes({**changes, "empty": b"", "of another file": other.read_bytes()}[damage])
    assert tokens_of(opened(folder, "best_fit")) == drawn
    assert packed == [16, 16]
    assert table.read_bytes() == whole


def test_a_table_of_other_lengths_is_not_found(make_dataset, random_documents, packed):
    for seed in (0, 1):
        folder = make_dataset({"books": (1.0, random_documents(seed, 40, 20))})
        opened(folder, "best_fit")
    assert packed == [16, 16]


def test_opening_reads_no_more_for_more_data(make_dataset):
    """10^10 tokens and 10^9 documents in sparse files whose tables are holes: checks and packing are remembered, and
    opening reads neither file."""
    folder = make_dataset({"books": (1.0, [[10] * 20])})
    num_tokens, documents = 10**10, 10**9
    with (folder / "train" / "books.bin").open("r+b") as file:
        file.truncate(2 * num_tokens)
    with (folder / "train" / "books.idx").open("r+b") as file:
        file.truncate(34 + 20 * documents + 8)
        for place, value, kind in (
            (18, documents, "<u8"),
            (26, documents + 1, "<u8"),
            (34 + 4 * (documents - 1), 10, "<i4"),
            (34 + 12 * documents - 8, 2 * num_tokens - 20, "<i8"),
        ):
            file.seek(place)
            file.write(np.array([value], kind).tobytes())
    described = json.loads((folder / DATASET_NAME).read_text())
    described["sources"][0]["splits"]["train"] |= {"tokens": num_tokens, "documents": documents}
    (folder / DATASET_NAME).write_text(json.dumps(described))
    state = dataset.checked_state(folder, "train", "books", 1000, None)
    write_cached(dataset.record_path(folder, "train", "books"), state)
    table = packing_table.table_path(folder, state["files"]["books.idx"], 1024)
    packing_table.write_table(table, np.arange(packing_table.num_groups(documents) + 1) * 40)
    samples = open_samples(folder, "train", 1024, 0, IndexConfig())
    assert samples.samples_of("books") == (num_tokens - 1) // 1024
    assert samples.sample(10**9)["tokens"].shape == (1024,)
    best_fit = open_samples(folder, "train", 1024, 0, IndexConfig(packing="best_fit"))
    assert best_fit.samples_of("books") == 40 * packing_table.num_groups(documents)
