"""Raw files by glob: what Python's glob finds, each once, whatever links point where."""

import glob
import os
from pathlib import Path

import pytest

from gristmill.data_pipeline.readers.file_kinds import foreign_kind
from gristmill.data_pipeline.readers.files import matching
from gristmill.data_pipeline.readers.local_files import local_files
from gristmill.data_pipeline.readers.resolve import locate, resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter

TREE = ("a.txt", "b.json", "x/a.txt", "x/y/c.txt", "x/y/z/d.txt", ".hidden/e.txt", "x/.f.txt", "[odd]/g.txt")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "*.txt",
        "**",
        "**/*.txt",
        "x/**",
        "x/**/*.txt",
        "*/y/**",
        "**/y/*.txt",
        "**/**/c.txt",
        "x/y",
        "a.txt",
        "./**/a.txt",
    ],
)
def test_what_pythons_glob_finds(tree, pattern):
    for each in (pattern, f"{tree}/{pattern}"):
        whole = f"{each}/**" if os.path.isdir(each) else each
        expected = {os.path.realpath(path) for path in glob.glob(whole, recursive=True) if os.path.isfile(path)}
        found = local_files(each)
        assert {os.path.realpath(path) for path in found} == expected
        assert len(found) == len(expected)


def test_links_that_form_a_loop_end(tree):
    for name in ("x/up", "x/y/up", "x/y/z/up"):
        os.symlink(tree, tree / name)
    os.symlink("itself", tree / "itself")
    assert local_files("**/*.txt") == ["[odd]/g.txt", "a.txt", "x/a.txt", "x/y/c.txt", "x/y/z/d.txt"]


def test_home_and_file_addresses(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert matching("~/x/*.txt") == {"a.txt": f"{tree}/x/a.txt"}
    assert matching(f"file://{tree}/x/*.txt") == {"a.txt": f"{tree}/x/a.txt"}
    with pytest.raises(InputError, match="a file URL is file:///"):
        matching("file://elsewhere/x/*.txt")


def test_the_name_of_a_file_or_folder_is_no_glob(tree):
    """`data [2024]` is a folder if there is one; a glob of one of four characters if there is none."""
    assert matching("[odd]") == matching("[odd]/") == {"g.txt": "[odd]/g.txt"}
    assert matching("[odd]/g.txt") == {"g.txt": "[odd]/g.txt"}
    assert matching("[abc].txt") == {"a.txt": "a.txt"}


def test_one_file_by_two_spellings_is_counted_once(tree):
    os.symlink("a.txt", "linked.txt")
    paths = ("a.txt", "./a.txt", f"{tree}/a.txt", "x/../a.txt", f"file://{tree}/a.txt", "linked.txt")
    assert locate(SourceConfig(name="s", format="text", paths=paths)) == {"a.txt": "a.txt"}


def test_a_picture_in_a_folder_of_jsonl_is_named(tree):
    Path("x/cat.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    source = SourceConfig(name="s", format="jsonl", paths=("x",))
    with pytest.raises(InputError, match=r"source s: x/cat.jsonl is a PNG picture, which format jsonl does not read"):
        resolve(source, LocalEngine(1, Reporter.silent()))


def test_kinds_by_first_bytes():
    assert foreign_kind(b'{"text": "PNG"}', "jsonl") is None
    assert foreign_kind(b"", "text") is None
    assert foreign_kind(b"PAR1....", "parquet") is None
    assert foreign_kind(b"PAR1....", "jsonl") == "a Parquet file"
    assert foreign_kind(b"\x00\x00\x00\x20ftypisom", "text") == "an MP4 or HEIC file"
