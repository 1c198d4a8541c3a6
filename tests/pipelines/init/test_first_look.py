"""The part of the files that a rehearsal reads, and what its seconds say of all files."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import prose

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.init import first_look
from gristmill.pipelines.init.recipe import RecipePlan, plan_sources
from gristmill.pipelines.init.survey import survey


def lines(count: int) -> bytes:
    return "".join(json.dumps({"text": prose(number)}) + "\n" for number in range(count)).encode()


def rows(path: Path, count: int) -> None:
    table = pa.table({"text": [prose(number) for number in range(count)]})
    pq.write_table(table, path, row_group_size=20, compression="none")


@pytest.fixture
def small_limits(monkeypatch):
    """About 20 kB of the files' content are read."""
    monkeypatch.setattr(first_look, "TEXT_BYTES", 1.0)
    monkeypatch.setattr(first_look, "MIN_RAW_BYTES", 20_000.0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt"])
def test_a_large_file_is_cut_at_a_record(name, tmp_path, small_limits):
    """What is cut holds whole records of the same source, about as many bytes as asked."""
    path = tmp_path / "mine" / name
    path.parent.mkdir()
    if name.endswith("parquet"):
        rows(path, 400)
    elif name.endswith("txt"):
        path.write_text("\n\n".join(prose(number) for number in range(400)))
    else:
        path.write_bytes(gzip.compress(lines(400)) if name.endswith("gz") else lines(400))
    sources = plan_sources(survey(tmp_path / "mine").groups)
    (part,) = first_look.rehearsed_sources(sources, tmp_path / "part")
    assert part.group.paths[0].parent == tmp_path / "part" / part.name
    assert 5_000 < part.group.num_bytes < 40_000
    cut = survey(tmp_path / "part").groups[0]
    assert cut.format == part.group.format and not cut.problems
    assert set(cut.texts) <= set(sources[0].group.texts) or name == "a.txt"


def test_files_are_spread_over_the_source_and_small_sources_stay_whole(tmp_path, small_limits):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text(prose(number))
    sources = plan_sources(survey(tmp_path).groups)
    (part,) = first_look.rehearsed_sources(sources, tmp_path / "part")
    numbers = [int(path.stem) for path in part.group.paths]
    assert len(numbers) < 60 and numbers[0] < 10 and numbers[-1] > 80
    assert first_look.rehearsed_sources(sources, tmp_path / "part", share=100.0) == sources


def test_fixed_seconds_are_told_from_those_by_size():
    cost = first_look._cost(less=1.0, more=2.5, small=1e6, large=4e6)
    assert (cost.fixed, cost.per_byte) == pytest.approx((0.5, 0.5e-6)) and cost.seconds(10e6) == pytest.approx(5.5)
    assert first_look._cost(less=2.0, more=1.9, small=1e6, large=4e6).per_byte == 0.0


def test_a_run_that_fails_says_what_the_command_said(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nsources: [{name: a, format: text, paths: [absent/*.txt]}]\ncurate: {}\n")
    with pytest.raises(InputError, match=r"failed on part of the files: source a: .*absent"):
        first_look.run_recipe(recipe, tmp_path / "work", "curate", Reporter.silent(), "curating")


def test_curation_of_the_whole_is_forecast_from_the_part(tmp_path, monkeypatch):
    """Seconds grow with the files, text by what was kept of the part."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(prose(number))
    sources = plan_sources(survey(tmp_path).groups)
    whole = sum(source.group.num_bytes for source in sources)
    monkeypatch.setattr(first_look, "MIN_RAW_BYTES", whole / 4)
    monkeypatch.setattr(first_look, "TEXT_BYTES", 1.0)
    read: list[int] = []

    def run_recipe(recipe, workdir, to, reporter, label):
        read.append(int(recipe.read_text()))
        return dict.fromkeys(first_look.CURATION, 1.0 + read[-1] / whole), 0.7

    def write(part, seed):
        (tmp_path / "r").write_text(str(sum(source.group.num_bytes for source in part)))
        return tmp_path / "r"

    kept = {split: {"bytes": 1000, "documents": 5} for split in ("train", "validation", "test")}
    counts = {"sources": {"text": {"kept": kept}}, "tokens": {"train": {"text": 300}}}
    monkeypatch.setattr(first_look, "run_recipe", run_recipe)
    monkeypatch.setattr(first_look, "read_manifest", lambda folder: SimpleNamespace(metadata=counts))
    curation = first_look.rehearse_curation(sources, write, tmp_path / "work", Reporter.silent())
    assert len(read) == 2 and read[1] < read[0] < whole
    assert curation.start == 0.7 and curation.stages["curate"] == pytest.approx(2.0)
    assert curation.text_bytes == pytest.approx(1000 * whole / read[0])
    assert curation.text_tokens == pytest.approx(300 * whole / read[0])


def test_of_few_documents_some_are_held_out(tmp_path):
    """Nine documents, 0.1 and 0.15 of them held out: by the first seed a split is empty, by the chosen one none is."""
    (tmp_path / "a.jsonl").write_bytes(lines(9))
    plan = RecipePlan("r", None, plan_sources(survey(tmp_path).groups), 1e4)
    recipe, work = tmp_path / "r.yaml", tmp_path / "work"

    def curated(seed: int) -> set[str]:
        recipe.write_text(replace(plan, seed=seed).curation_text())
        first_look.run_recipe(recipe, work, "curate", Reporter.silent(), "curating")
        paths = (work / "curate" / "documents").rglob("*.parquet")
        return {path.parent.name for path in paths if pq.read_metadata(path).num_rows}

    assert curated(1) != {"train", "validation", "test"}
    seed = first_look.seed_that_holds_out(work / "curate", recipe)
    assert curated(seed) == {"train", "validation", "test"}
    assert first_look.seed_that_holds_out(work / "curate", recipe) == 1  # nothing is to be changed


def test_the_recipe_of_a_part_names_each_file(tmp_path):
    (tmp_path / "a [1].txt").write_text(prose(1) * 20)
    sources = plan_sources(survey(tmp_path).groups)
    text = RecipePlan("r", None, sources, 1e6).curation_text()
    assert "a [[]1].txt" in text and "**" not in text
