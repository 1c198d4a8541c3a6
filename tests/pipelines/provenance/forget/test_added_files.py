"""`gristmill curate --add`: new raw files are accepted, changed ones are not, and the bytes are those of one run."""

import json
import random
from pathlib import Path

import pytest

from gristmill.data_pipeline.annotate import annotate
from gristmill.data_pipeline.dedup import signatures
from gristmill.foundation.files import file_digest
from gristmill.pipelines.cli.main import main

WORDS = [f"{begin}{end}" for begin in ("bar", "dol", "mir", "tan") for end in ("an", "eth", "is", "o", "u")]


def write_file(raw: Path, number: int, documents: int = 12) -> None:
    """A file of texts, the first of which is a near copy of the first of file 0."""
    raw.mkdir(exist_ok=True)
    generators = [random.Random(0), *(random.Random(1000 * number + place) for place in range(1, documents))]
    texts = [" ".join(generator.choice(WORDS) for _ in range(90)) for generator in generators]
    texts[0] += f" file {number}"
    lines = (json.dumps({"text": text}) for text in texts)
    (raw / f"part-{number:02d}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def curate(folder: Path, work: str, *options: str) -> int:
    source = {"name": "s", "format": "jsonl", "paths": [f"{folder}/raw/*.jsonl"]}
    recipe = {"name": "grown", "seed": 3, "sources": [source], "curate": {"filters": [], "shard_bytes": 4000}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    arguments = ["curate", folder / "recipe.yaml", "--workdir", folder / work, "--workers", "1", *options]
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def outputs(corpus: Path) -> dict[str, str]:
    files = (path for path in corpus.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(corpus).as_posix(): file_digest(path) for path in files}


def inodes(folder: Path) -> set[int]:
    """A shard that was taken over is a hard link to the one before."""
    return {path.stat().st_ino for path in folder.rglob("*.parquet")}


def set_small_sizes(monkeypatch) -> None:
    """Annotated files, shards and ledgers of a few documents."""
    monkeypatch.setattr("gristmill.data_pipeline.annotate.annotate.MIN_RANGE_BYTES", 8_000)
    monkeypatch.setattr("gristmill.data_pipeline.corpus.shards.MIN_SHARD_BYTES", 4_000)
    monkeypatch.setattr("gristmill.data_pipeline.ledger.ledger.MIN_LEDGER_ROWS", 16)


@pytest.fixture
def small_ranges(monkeypatch):
    set_small_sizes(monkeypatch)


def test_an_added_file_gives_the_bytes_of_one_run_and_touches_little(tmp_path, monkeypatch, small_ranges):
    for number in range(16):
        write_file(tmp_path / "raw", number)
    assert curate(tmp_path, "grown") == 0
    write_file(tmp_path / "raw", 16)
    annotated, signed = [], []
    whole = annotate.annotate, signatures.signed_batches
    monkeypatch.setattr(annotate, "annotate", lambda task: (annotated.append(task.path), whole[0](task)))
    monkeypatch.setattr(signatures, "signed_batches", lambda *task: (signed.append(task[0].path), whole[1](*task))[1])
    before = {table: inodes(tmp_path / "grown" / "curate" / table) for table in ("documents", "signals", "ledger")}
    assert curate(tmp_path, "grown", "--add") == 0
    assert len(annotated) in (1, 2)  # the group of the new file, which may be divided
    assert set(signed) <= set(annotated)
    monkeypatch.undo()
    set_small_sizes(monkeypatch)
    assert curate(tmp_path, "one") == 0
    assert outputs(tmp_path / "grown" / "curate") == outputs(tmp_path / "one" / "curate")
    for table, shards in before.items():
        after = inodes(tmp_path / "grown" / "curate" / table)
        assert len(after) > 8
        assert len(after & shards) > len(after) / 2


def test_a_changed_file_is_not_accepted_with_new_ones(tmp_path, capsys):
    write_file(tmp_path / "raw", 0)
    assert curate(tmp_path, "work") == 0
    write_file(tmp_path / "raw", 1)
    assert curate(tmp_path, "work") == 1
    write_file(tmp_path / "raw", 0, documents=13)
    assert curate(tmp_path, "work", "--add") == 1
    said = capsys.readouterr().err
    assert "part-00.jsonl" in said.splitlines()[-2]
    assert "accept them with --update-lock" in said


def test_a_new_file_needs_the_option(tmp_path, capsys):
    write_file(tmp_path / "raw", 0)
    assert curate(tmp_path, "work") == 0
    write_file(tmp_path / "raw", 1)
    assert curate(tmp_path, "work") == 1
    assert "part-01.jsonl" in capsys.readouterr().err
    assert curate(tmp_path, "work", "--add") == 0
