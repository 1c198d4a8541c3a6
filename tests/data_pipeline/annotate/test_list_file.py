import gzip
import hashlib

import pytest

from gristmill.data_pipeline.annotate.list_file import ListsConfig, lock_lists, read_list, read_locked_list
from gristmill.data_pipeline.annotate.optional_signals import locked_list
from gristmill.foundation.errors import InputError


def test_one_entry_a_line(tmp_path):
    raw = "\ufeff# a list\n one \n\ntwo words\r\n#not this\nthree # but this\n".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    digest, listed = read_list(str(tmp_path / "a.txt"))
    assert listed == ("one", "two words", "three # but this")
    assert digest == hashlib.sha256(raw).hexdigest()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(raw))
    assert read_list(str(tmp_path / "a.txt.gz"))[1] == listed


def test_the_lock_names_the_files_of_each_list(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\nboth\n")
    lists = ListsConfig(badwords=(str(tmp_path / "*.txt"), str(tmp_path / "a.txt")))
    [locked] = lock_lists(lists)
    assert locked.name == "lists.badwords" and sorted(file.name for file in locked.files) == ["a.txt", "b.txt"]
    word_list = locked_list(lists.badwords)
    assert word_list is not None and read_locked_list(word_list) == ("a", "b", "both")
    assert "paths" not in word_list.model_dump() and list(word_list.digests) == [file.sha256 for file in locked.files]
    assert locked_list(()) is None and lock_lists(ListsConfig()) == ()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"# no entry\n \n", "the list is empty; write one entry per line"),
        (b"one\ntw\xffo\n", "line 2 is not UTF-8"),
    ],
)
def test_bad_lists_say_what_to_mend(tmp_path, raw, said):
    (tmp_path / "bad.txt").write_bytes(raw)
    with pytest.raises(InputError, match=rf"bad\.txt: {said}"):
        read_list(str(tmp_path / "bad.txt"))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"one\n" * 1000)[:-9])
    with pytest.raises(InputError, match=r"cut\.txt\.gz: truncated gz file"):
        read_list(str(tmp_path / "cut.txt.gz"))


def test_a_list_that_changes_while_it_is_in_use(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    locked = locked_list((str(tmp_path / "a.txt"),))
    (tmp_path / "a.txt").write_text("two\n")
    with pytest.raises(InputError, match="changed during the run"):
        read_locked_list(locked)
