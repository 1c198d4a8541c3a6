"""Raw files by glob: what Python's glob finds, each once, whatever links point where."""

import errno
import glob
import gzip
import hashlib
import io
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, annotate_all, annotation_tasks
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig
from gristmill.data_pipeline.readers import read as read_module
from gristmill.data_pipeline.readers import resolve as resolve_module
from gristmill.data_pipeline.readers.files import RealPaths, foreign_kind, local_files, matching
from gristmill.data_pipeline.readers.read import (
    FileToSplit,
    file_ranges,
    locate,
    located_files,
    read_range,
    split_files,
)
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter, plain_console
from gristmill.foundation.runtime.tasks.local import LocalEngine

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
        "*/*.txt",
        "x/*/*.txt",
        "*/y/c.txt",
        "[x]/?.txt",
        ".*/e.txt",
        "x/.*",
        "a.txt/*",
        "x//*.txt",
        "gone/*.txt",
    ],
)
def test_what_pythons_glob_finds(tree, pattern):
    for each in (pattern, f"{tree}/{pattern}"):
        whole = f"{each}/**" if os.path.isdir(each) else each
        expected = {os.path.realpath(path) for path in glob.glob(whole, recursive=True) if os.path.isfile(path)}
        found = list(local_files(each))
        assert {os.path.realpath(path) for path in found} == expected
        assert len(found) == len(expected)


def test_links_that_form_a_loop_end(tree):
    for name in ("x/up", "x/y/up", "x/y/z/up"):
        os.symlink(tree, tree / name)
    os.symlink("itself", tree / "itself")
    assert sorted(local_files("**/*.txt")) == ["[odd]/g.txt", "a.txt", "x/a.txt", "x/y/c.txt", "x/y/z/d.txt"]


@pytest.mark.parametrize("pattern", ["**", "x", "x/*/*.txt", "x/y/*", "x/**/c.txt", "*/y/**/*.txt"])
def test_a_folder_that_cannot_be_listed_is_named(tree, monkeypatch, pattern):
    """Its files would be missing from the corpus. Not by permissions: the superuser may list all folders."""

    def scandir(path, original=os.scandir):
        if os.path.realpath(path) == str(tree / "x/y"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"x/y/?: cannot be listed \(Permission denied\); give yourself access"):
        list(local_files(pattern))
    assert list(local_files("x/*.txt")) == ["x/a.txt"]


def test_a_file_that_cannot_be_looked_at_is_named(tree, monkeypatch):
    def stat(path, original=os.stat, **options):
        if path == "x/y/c.txt":
            raise OSError(errno.EIO, "Input/output error", path)
        return original(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(InputError, match=r"x/y/c\.txt: cannot be listed \(Input/output error\)"):
        list(local_files("x/*/c.txt"))
    assert list(local_files("x/*/\0.txt")) == list(local_files("x/" + 300 * "y" + "/*.txt")) == []


def test_home_and_file_addresses(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert dict(matching("~/x/*.txt")) == {"a.txt": f"{tree}/x/a.txt"}
    assert dict(matching(f"file://{tree}/x/*.txt")) == {"a.txt": f"{tree}/x/a.txt"}
    with pytest.raises(InputError, match="a file URL is file:///"):
        dict(matching("file://elsewhere/x/*.txt"))


def test_the_name_of_a_file_or_folder_is_no_glob(tree):
    """`data [2024]` is a folder if there is one; a glob of one of four characters if there is none."""
    assert dict(matching("[odd]")) == dict(matching("[odd]/")) == {"g.txt": "[odd]/g.txt"}
    assert dict(matching("[odd]/g.txt")) == {"g.txt": "[odd]/g.txt"}
    assert dict(matching("[abc].txt")) == {"a.txt": "a.txt"}


def test_one_file_by_two_spellings_is_counted_once(tree):
    os.symlink("a.txt", "linked.txt")
    paths = ("a.txt", "./a.txt", f"{tree}/a.txt", "x/../a.txt", f"file://{tree}/a.txt", "linked.txt")
    assert list(locate(SourceConfig(name="s", format="text", paths=paths))) == [("a.txt", "a.txt")]


def test_a_picture_in_a_folder_of_jsonl_is_named(tree):
    Path("x/cat.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    source = SourceConfig(name="s", format="jsonl", paths=("x",))
    with pytest.raises(InputError, match=r"source s: x/cat.jsonl is a PNG picture, which format jsonl does not read"):
        resolve([source], LocalEngine(1, Reporter.silent()))


def test_kinds_by_first_bytes():
    assert foreign_kind(b'{"text": "PNG"}', "jsonl") is None
    assert foreign_kind(b"", "text") is None
    assert foreign_kind(b"PAR1....", "parquet") is None
    assert foreign_kind(b"PAR1....", "jsonl") == "a Parquet file"
    assert foreign_kind(b"\x00\x00\x00\x20ftypisom", "text") == "an MP4 or HEIC file"


# A raw file that changes during the run stops it, however it is read, and nothing read from it is published.

LINES = b"".join(b'{"text": "this is line number %d"}\n' % k for k in range(100_000))  # over 3 blocks of 1 MiB
PAGE = b"<html><body><p>A page of some words, and then of a few more.</p></body></html>"
WARC = b"WARC/1.0\r\nWARC-Type: resource\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE
ENGINE = LocalEngine(1, Reporter.silent())


def parquet() -> bytes:
    held = pa.BufferOutputStream()
    table = pa.table({"text": [f"this is row number {k}" for k in range(200_000)]})
    pq.write_table(table, held, row_group_size=20_000, compression="none", use_dictionary=False)
    return held.getvalue().to_pybytes()


CONTENTS = {
    ("jsonl", "a.jsonl"): LINES,
    ("jsonl", "a.jsonl.gz"): gzip.compress(LINES),
    ("text", "a.txt"): b"words\n" * 1000,
    ("html", "a.html"): PAGE,
    ("warc", "a.warc"): WARC,
    ("arc", "a.arc"): b"http://a.b/ 1.2.3.4 20140216050221 text/html %d\n%b\n" % (len(PAGE), PAGE),
    ("parquet", "a.parquet"): parquet(),
}
WHOLE, IN_PARTS = 1 << 40, 1 << 20


def locked(tmp_path: Path, kind: str, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    source = SourceConfig(name="s", format=kind, paths=(str(path),), extractor="resiliparse")
    return path, source, resolve([source], ENGINE)[0]


@pytest.mark.parametrize("part_bytes", [WHOLE, IN_PARTS])
@pytest.mark.parametrize(("kind", "name"), CONTENTS)
def test_a_byte_that_is_not_the_locks_stops_the_reading(kind, name, part_bytes, tmp_path):
    content = CONTENTS[kind, name]
    path, source, lock = locked(tmp_path, kind, name, content)
    [(file, location)] = located_files(source, lock)
    parts = file_ranges(file, location, source, part_bytes)
    assert len(parts) > 2 or part_bytes == WHOLE or name not in ("a.jsonl", "a.parquet")
    assert all(sum(1 for _ in read_range(part, source)) for part in parts)
    for at in (3, len(content) // 2, len(content) - 5):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"changed during the run.*--update-lock"):
            for part in parts:
                list(read_range(part, source))


@pytest.mark.parametrize("part_bytes", [WHOLE, IN_PARTS])
def test_a_file_that_grew_shrank_or_went(part_bytes, tmp_path):
    path, source, lock = locked(tmp_path, "jsonl", "a.jsonl", LINES)
    [(file, location)] = located_files(source, lock)
    parts = file_ranges(file, location, source, part_bytes)
    for content in (LINES[:-40], LINES[: len(LINES) // 2], b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match="changed during the run"):
            for part in parts:
                list(read_range(part, source))
    path.write_bytes(LINES + b'{"text": "more"}\n')
    with pytest.raises(InputError, match="changed during the run"):
        file_ranges(file, location, source, IN_PARTS)
    with pytest.raises(InputError, match="changed during the run"):
        list(read_range(file_ranges(file, location, source, WHOLE)[0], source))
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be opened"):
        list(read_range(parts[0], source))


def test_a_file_that_is_damaged_as_well_is_compared_to_its_end(tmp_path):
    """A reader that meets damage stops before the end of the file."""
    packed = bytearray(gzip.compress(LINES, 1))
    packed[100] ^= 0xFF
    path, source, lock = locked(tmp_path, "jsonl", "a.jsonl.gz", bytes(packed))
    [(file, location)] = located_files(source, lock)
    [part] = file_ranges(file, location, source, WHOLE)
    assert list(read_range(part, source))[-1].kind == "damaged"
    packed[-1] ^= 1
    path.write_bytes(packed)
    with pytest.raises(InputError, match="changed during the run"):
        list(read_range(part, source))


def test_a_folder_of_a_dataset(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(folder)
    source = SourceConfig(name="s", format="datasets", paths=(str(folder),))
    [(file, location)] = located_files(source, resolve([source], ENGINE)[0])
    [part] = file_ranges(file, location, source, WHOLE)
    assert len(list(read_range(part, source))) == 2
    (folder / "more.txt").write_text("more")
    with pytest.raises(InputError, match="changed during the run"):
        list(read_range(part, source))


@pytest.mark.parametrize(("kind", "name"), [("jsonl", "a.jsonl"), ("jsonl", "a.jsonl.gz"), ("parquet", "a.parquet")])
def test_nothing_of_a_changed_file_is_kept(kind, name, tmp_path):
    path, source, lock = locked(tmp_path, kind, name, CONTENTS[kind, name])
    config = AnnotateConfig(normalize=NormalizeConfig(), word_tokenizer="unicode", language_id=None, edits=())
    [tasks] = annotation_tasks([(source, lock, config)], tmp_path / "cache", ENGINE)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="changed during the run"):
        annotate_all(tasks[-1:], ENGINE)
    assert os.listdir(tmp_path / "cache") == []


def test_digests_are_kept_while_a_file_stays_as_it_is(tmp_path, monkeypatch):
    """Also one that is written again with as many bytes and its old times."""
    monkeypatch.setattr(resolve_module, "is_settled", lambda state: True)  # else only after two seconds
    digested = []
    digest = resolve_module._digest
    monkeypatch.setattr(resolve_module, "_digest", lambda location: digested.append(location) or digest(location))
    path, source, first = locked(tmp_path, "jsonl", "a.jsonl", LINES * 4)
    assert path.stat().st_size > resolve_module.MIN_KEPT_BYTES
    resolve([source], ENGINE, tmp_path)
    digested.clear()
    assert resolve([source], ENGINE, tmp_path) == [first] and digested == []
    times = path.stat()
    path.write_bytes((LINES * 4).replace(b"1", b"2"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    [second] = resolve([source], ENGINE, tmp_path)
    assert digested == [str(path)] and second.files[0].bytes == first.files[0].bytes
    assert second.files[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest() != first.files[0].sha256


def test_ranges_are_kept_and_those_of_a_damaged_list_found_again(tmp_path, monkeypatch):
    path, source, lock = locked(tmp_path, "jsonl", "a.jsonl", LINES)
    [(file, location)] = located_files(source, lock)
    to_split = [FileToSplit(file, location, source, IN_PARTS, 4)]
    calls = []
    split = read_module.file_ranges
    monkeypatch.setattr(read_module, "file_ranges", lambda *arguments: calls.append(1) or split(*arguments))
    [first] = split_files(to_split, tmp_path, ENGINE)
    [second] = split_files(to_split, tmp_path, ENGINE)
    assert first == second == split(file, location, source, IN_PARTS) and len(first) > 2 and calls == [1]
    assert np.array_equal(first[0].blocks.digests, second[0].blocks.digests)
    kept = tmp_path / read_module.KEPT_RANGES
    kept.write_bytes(kept.read_bytes().replace(b"1", b"2"))
    assert split_files(to_split, tmp_path, ENGINE) == [first] and calls == [1, 1]
    path.write_bytes(LINES.replace(b"1", b"2"))
    with pytest.raises(InputError, match="changed during the run"):
        list(read_range(second[1], source))


def test_a_name_that_is_no_utf8_is_read_and_named_by_escapes(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(path, "wb") as file:
        file.write(b"words")
    source = SourceConfig(name="s", format="text", paths=(str(tmp_path),))
    [lock] = resolve([source], ENGINE)
    assert [file.name for file in lock.files] == ["caf\\xe9.txt"]
    lock.model_dump_json().encode()
    [(file, location)] = located_files(source, lock)
    assert [record.text for record in read_range(file_ranges(file, location, source, WHOLE)[0], source)] == ["words"]
    with open(path, "wb") as opened:
        opened.write(b"other")
    with pytest.raises(InputError, match=r"caf\\xe9.txt: the file changed") as error:
        list(read_range(file_ranges(file, location, source, WHOLE)[0], source))
    str(error.value).encode()


def test_the_files_of_all_sources_are_digested_together(tmp_path):
    """Ten small sources are one group of files and one line of progress; equal contents are numbered by source."""
    sources = []
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("equal" if number < 2 else str(number))
        sources.append(SourceConfig(name=f"s{number}", format="text", paths=(str(tmp_path / f"{number}.txt"),)))
    screen = io.StringIO()
    locked = resolve(sources, LocalEngine(1, Reporter(plain_console(screen))))
    assert [source.name for source in locked] == [f"s{number}" for number in range(10)]
    assert [source.files for source in locked] == [resolve([source], ENGINE)[0].files for source in sources]
    assert [file.copy_index for source in locked[:2] for file in source.files] == [0, 0]
    assert screen.getvalue().count("digests") == 1


def test_real_paths_are_those_of_the_operating_system(tmp_path, monkeypatch):
    """Files, links to files and to folders, relative paths: one look at each folder says the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "real" / "link.txt").symlink_to("a.txt")
    (tmp_path / "alias").symlink_to("real")
    real_path = RealPaths()
    names = ("real/a.txt", "real/link.txt", "alias/a.txt", "alias/link.txt", "real/../alias/a.txt", "alias", "gone/x")
    for path in (*names, *(f"{tmp_path}/{name}" for name in names), "/"):
        assert real_path(path) == os.path.realpath(path)
