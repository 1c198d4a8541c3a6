import pytest

from gristmill.foundation.checksums import Lock, LockedSource, RawFile, in_canonical_order, lock_differences, read_lock
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import digested_json


def raw(name, digest, copy_index=0):
    return RawFile(name=name, bytes=1, sha256=digest, copy_index=copy_index)


def test_canonical_order():
    """Digest first, then name: where the files lie and how the disk lists them leaves no trace."""
    assert in_canonical_order([raw("b", "d1"), raw("a", "d1"), raw("c", "d0")]) == (
        raw("c", "d0", 0),
        raw("a", "d1", 0),
        raw("b", "d1", 1),
    )


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
    lock = Lock(sources=(poems, prose))
    assert lock.source("poems") == poems and lock.source("prose") == prose


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
    lock = Lock(sources=(LockedSource(name="s", request={}, files=(raw("a", "d"),)),)).model_dump(mode="json")
    lock["sources"][0]["files"][0]["bytes"] = num_bytes
    (tmp_path / "lock.json").write_bytes(digested_json(lock))
    with pytest.raises(InputError, match=r"lock\.json: not a lock (.|\n)*files.0.bytes"):
        read_lock(tmp_path / "lock.json")
