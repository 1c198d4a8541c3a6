import hashlib
import pickle
import tempfile
from itertools import starmap

import pytest

from gristmill.foundation import lock
from gristmill.foundation.errors import InputError, explain_disk_error
from gristmill.foundation.files import digest_changes
from gristmill.foundation.fingerprint import DIGEST_FIELD, digested_json, fingerprint
from gristmill.foundation.lock import (
    Lock,
    LockedSource,
    RawFile,
    SortedRecords,
    in_canonical_order,
    lock_differences,
    read_lock,
    write_lock,
)


def raw(name, digest, copy_index=0):
    return RawFile(name=name, bytes=1, sha256=digest, copy_index=copy_index)


def test_canonical_order():
    """Digest first, then name: where the files lie and how the disk lists them leaves no trace."""
    assert list(in_canonical_order([raw("b", "d1"), raw("a", "d1"), raw("c", "d0")])) == [
        raw("c", "d0", 0),
        raw("a", "d1", 0),
        raw("b", "d1", 1),
    ]


def test_a_source_that_is_not_pinned_is_named():
    with pytest.raises(InputError, match="has no source 'poems'"):
        Lock(sources=()).source("poems")


def test_names_do_not_count_in_the_identity():
    here = Lock(sources=(LockedSource(name="s", request={}, files=(raw("here/a", "d"),)),))
    there = Lock(sources=(LockedSource(name="s", request={}, files=(raw("there/a", "d"),)),))
    assert here.identity() == there.identity()


def test_differences_in_words():
    before = LockedSource(name="s", request={}, files=(raw("a", "1" * 64), raw("b", "2" * 64)))
    after = LockedSource(name="s", request={}, files=(raw("b", "3" * 64), raw("c", "4" * 64)))
    assert lock_differences(before, after) == [
        "a: gone",
        "c: new",
        "b: sha256 was 2222222222222222..., is 3333333333333333...",
    ]


def test_a_source_is_returned_by_its_name():
    poems, prose = (LockedSource(name=name, request={}, files=(raw("a", name),)) for name in ("poems", "prose"))
    pinned = Lock(sources=(poems, prose))
    assert pinned.source("poems") == poems and pinned.source("prose") == prose


def test_contents_and_copies_count_in_the_identity():
    def identity(*files):
        return Lock(sources=(LockedSource(name="s", request={}, files=files),)).identity()

    assert identity(raw("a", "d")) != identity(raw("a", "e"))
    assert identity(raw("a", "d")) != identity(raw("a", "d", 1))
    assert list(identity(raw("a", "d"))) == ["s"]


def test_equal_files_are_numbered_from_zero():
    files = in_canonical_order([raw(name, "d") for name in "cab"])
    assert [(file.name, file.copy_index) for file in files] == [("a", 0), ("b", 1), ("c", 2)]


@pytest.mark.parametrize("num_bytes", [True, "1", None])
def test_a_size_that_is_no_number_is_refused(tmp_path, num_bytes):
    fields = Lock(sources=(LockedSource(name="s", request={}, files=(raw("a", "d"),)),)).model_dump(mode="json")
    fields["sources"][0]["files"][0]["bytes"] = num_bytes
    (tmp_path / "lock.json").write_bytes(digested_json(fields))
    with pytest.raises(InputError, match=r"lock\.json: not a lock (.|\n)*files.0.bytes"):
        read_lock(tmp_path / "lock.json")


ONE = '[{"files":[{"bytes":%s,"copy_index":0,"name":"x","sha256":"d"}],"name":"a","request":{}}]'


@pytest.mark.parametrize(
    "sources",
    [
        ONE % 10**30,
        ONE % -1,
        '[{"files":[],"files":[],"name":"a","request":{}}]',
        '[{"files":[],"name":"a","name":"b","files":[],"request":{}}]',
        '[{"files":[],"name":"a","request":{"b":%s}}]' % ("[" * 10**5 + "]" * 10**5),
        (ONE % 1)[:-15],
        '[{"name":"a","request":{}}]',
        "[1]",
    ],
    ids=["large", "negative", "twice", "twice, apart", "deep", "cut off", "no files", "number"],
)
def test_a_lock_that_others_wrote_is_refused(tmp_path, sources):
    """Its digest is right."""
    rest = f'"sources":{sources}}}'.encode()
    digest = hashlib.sha256(b"{" + rest).hexdigest().encode()
    (tmp_path / "lock.json").write_bytes(b'{"%s":"%s",%s\n' % (DIGEST_FIELD.encode(), digest, rest))
    with pytest.raises(InputError, match=r"lock\.json: not a lock (.|\n)*; remove it to pin the raw files again"):
        read_lock(tmp_path / "lock.json")


@pytest.fixture
def little_memory(monkeypatch):
    """What millions of files do, three at a time: temporary files, batches and blocks."""
    for name, value in {"MAX_HELD": 3, "RUN_BLOCK_BYTES": 70, "BLOCK_BYTES": 40}.items():
        monkeypatch.setattr(lock, name, value)


NAMES = ["", "a", 'b"],"name":', 'c},{"bytes":', "d\\", 'e,{"files":[', "f\n]}\n", "\u4e2d", "g\x00", "h/i.txt"]


@pytest.mark.parametrize("number", [0, 1, 3, 4, 10])
def test_a_lock_is_written_and_read_in_parts(tmp_path, little_memory, number):
    files = [raw(name, f"{place % 4}" * 64) for place, name in enumerate(NAMES[:number])]
    pinned = Lock(
        sources=(
            LockedSource(name='s"],"name":', request={"paths": NAMES, "c": {"d": []}}, files=in_canonical_order(files)),
            LockedSource(name="t", request={}, files=in_canonical_order(files[::-1])),
        )
    )
    assert pinned.sources[0].files == pinned.sources[1].files and len(pinned.sources[0].files) == number
    assert [pinned.sources[0].files[k] for k in range(number)] == list(pinned.sources[0].files)
    write_lock(tmp_path / "lock.json", pinned)
    content = (tmp_path / "lock.json").read_bytes()
    assert content == digested_json(pinned.model_dump(mode="json"))
    with (tmp_path / "lock.json").open("rb") as file:
        assert Lock(sources=tuple(lock._stored_sources(file))) == read_lock(tmp_path / "lock.json") == pinned
    pairs = [[file.sha256, file.copy_index] for file in pinned.sources[0].files]
    assert pinned.identity()["t"] == fingerprint(pairs)


def test_a_lock_without_sources(tmp_path):
    write_lock(tmp_path / "lock.json", Lock(sources=()))
    assert read_lock(tmp_path / "lock.json") == Lock(sources=())


def test_records_are_sorted_on_disk(little_memory):
    records = [(name, number, name) for number, name in enumerate(["\udcff", *NAMES] * 3)]
    ordered = SortedRecords(records)
    assert list(ordered) == list(ordered) == sorted(records)


@pytest.mark.parametrize("make", [SortedRecords, lambda records: in_canonical_order(starmap(raw, records))])
def test_a_full_temporary_folder_is_named(little_memory, monkeypatch, make):
    monkeypatch.setattr(lock.tempfile, "TemporaryFile", lambda: open("/dev/full", "wb+"))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as caught:
        make([(name, "d") for name in NAMES])
    assert explain_disk_error(caught.value).startswith(
        f"{tempfile.gettempdir()} (temporary files; TMPDIR names another folder): the disk is full"
    )


def test_files_in_columns_travel(little_memory):
    files = in_canonical_order([raw(name, "d") for name in NAMES])
    assert pickle.loads(pickle.dumps(files)) == files
    assert files[-1] == files[9] and files[1:3] == (files[1], files[2]) and files != in_canonical_order([])


def test_differences_are_those_of_whole_lists(little_memory):
    before = {name: f"{place}" * 64 for place, name in enumerate("abcdefg")}
    after = {name: f"{place % 5}" * 64 for place, name in enumerate("abcdefgh")} | {"i": "0" * 64}
    del after["a"]
    pinned, current = (
        LockedSource(name="s", request={}, files=in_canonical_order([raw(*item) for item in files.items()]))
        for files in (before, after)
    )
    assert lock_differences(pinned, current) == digest_changes(before, after)
    assert lock_differences(pinned, current, with_new=False) == [
        line for line in digest_changes(before, after) if not line.endswith("new")
    ]
