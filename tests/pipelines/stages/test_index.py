"""A recipe with index.mix: its cells hold the training documents, its run reads them as the table says."""

from itertools import chain, pairwise

import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.index import indexed_mix, mix_events
from gristmill.pipelines.stages.preflight import preflight
from gristmill.pipelines.stages.stage_list import STAGES
from gristmill.pipelines.workdir.data_forms import open_format, sampling
from tests.support.corpora import prose, tree_digests, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    for name, numbers in (("web", range(120)), ("books", range(500, 540))):
        write_jsonl(folder / f"{name}.jsonl", [{"text": prose(number)} for number in numbers])
    return folder


def recipe(folder, **mix) -> dict:
    return {
        "name": "mixed",
        "sources": [
            {"name": name, "format": "jsonl", "paths": [str(folder / f"{name}.jsonl")], "weight": weight}
            for name, weight in (("web", 3), ("books", 1))
        ],
        "curate": {"filters": [], "splits": {"validation": 0.1, "test": 0.0}},
        "tokenizer": {"vocab_size": 300, "sample_bytes": 10**6},
        "index": {"mix": mix},
        "model": {"layers": 1, "width": 16, "heads": 1, "sequence_length": 32},
        "train": {"tokens": 32768, "batch_tokens": 1024},
    }


@pytest.fixture(scope="module")
def indexed(folder):
    """(recipe, work folder): web in four cells by the length of its words, books whole."""
    settings = recipe(folder, score="mean_word_length", sources=["web"], buckets=4)
    workdir = run_recipe(settings, folder / "work", "index")
    return Recipe.model_validate(settings), workdir


def documents_of(prefix) -> list[list[int]]:
    return sorted(document.tolist() for document in IndexedReader(prefix).documents())


def test_the_cells_hold_each_training_document_once_and_equal_tokens(folder, indexed):
    _, workdir = indexed
    plain = recipe(folder, score="x") | {"index": {}}
    whole = run_recipe(plain, folder / "plain", "index") / "index"
    index = workdir / "index"
    names = [source.name for source in read_dataset(index).sources]
    assert names == ["web", "web.q00", "web.q01", "web.q02", "web.q03", "books"]
    cells = [documents_of(index / "train" / name) for name in names[1:5]]
    assert sorted(chain.from_iterable(cells)) == documents_of(whole / "train/web")
    sizes = [sum(map(len, cell)) for cell in cells]
    assert max(sizes) < 1.15 * min(sizes)
    for name in ("train/books.bin", "validation/web.bin", "validation/books.bin"):
        assert (index / name).read_bytes() == (whole / name).read_bytes()
    scores = pq.read_table(index / "cells/web.parquet").to_pylist()
    by_cell = {name: [row["score"] for row in scores if row["cell"] == name] for name in names[1:5]}
    assert all(max(by_cell[low]) <= min(by_cell[high]) for low, high in pairwise(names[1:5]))


def test_a_run_reads_each_cell_as_often_as_the_table_says(indexed):
    loaded, workdir = indexed
    table = indexed_mix(loaded, workdir / "index").rows
    assert [row.times for row in table[:4]] == sorted(row.times for row in table[:4])
    draws = open_format("windows", workdir / "index", "train", loaded).drawn(32768 // 32)
    by_name = {draw.source: draw for draw in draws}
    for row in table:
        assert by_name[row.cell.name].epochs == pytest.approx(row.times, abs=0.02)
    assert sum(draw.tokens for draw in draws) == 32768
    held_out = open_format("windows", workdir / "index", "validation", loaded)
    assert set(held_out.sources) == {"web", "books"}


def test_another_curve_changes_samples_and_no_file(folder, indexed):
    loaded, workdir = indexed
    before = tree_digests(workdir / "index")
    settings = recipe(folder, score="mean_word_length", sources=["web"], buckets=4, power=3, max_epochs=20)
    run_recipe(settings, folder / "work", "index")
    assert tree_digests(workdir / "index") == before
    dataset = read_dataset(workdir / "index")
    changed = sampling(Recipe.model_validate(settings), dataset).phases[0].weights
    assert changed["web.q03"] > sampling(loaded, dataset).phases[0].weights["web.q03"]


def test_plan_and_why_show_the_table(folder, indexed, monkeypatch):
    loaded, workdir = indexed
    row = pq.read_table(workdir / "index/cells/web.parquet").to_pylist()[0]
    (event,) = mix_events(row["doc_id"], workdir)
    assert event.outcome == f"cell {row['cell']}" and "in the run of 32,768 tokens" in event.lines[1]
    monkeypatch.chdir(folder)
    content = loaded.model_dump(mode="json", exclude_defaults=True)
    (folder / "mixed.yaml").write_bytes(orjson.dumps(content))
    result = CliRunner().invoke(app, ["plan", "mixed.yaml", "--workdir", str(folder / "none")])
    assert "mix, estimated from the raw files, before curation:\n  source web, bucket 0: " in result.output
    result = CliRunner().invoke(app, ["plan", "mixed.yaml", "--workdir", str(workdir)])
    assert "mix, as indexed:" in result.output and "bucket 3:" in result.output and "source books:" in result.output


def test_a_cap_that_binds_is_found_before_work_and_before_training(folder, indexed):
    _, workdir = indexed
    settings = recipe(folder, score="mean_word_length", sources=["web"], buckets=4, max_epochs=0.1)
    loaded = Recipe.model_validate(settings)
    with pytest.raises(RecipeError, match=r"web\.q03 .* reaches the cap first"):
        indexed_mix(loaded, workdir / "index")
    findings = preflight(loaded, [stage for stage in STAGES if stage.name == "index"], 1)
    assert [finding.error for finding in findings if "reaches the cap first" in finding.text] == [None]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"score": "quality_edu"}, "index.mix.score: curate.quality_scores has no 'edu'; it has none"),
        ({"score": "mean_word_length", "sources": ["wob"]}, "index.mix.sources names 'wob'"),
    ],
)
def test_scores_and_sources_that_are_not_there_are_found_before_work(folder, mix, message):
    findings = preflight(Recipe.model_validate(recipe(folder, **mix)), [s for s in STAGES if s.name == "index"], 1)
    assert any(message in finding.text for finding in findings)


def test_a_signal_that_the_corpus_lacks_is_named(folder, indexed):
    with pytest.raises(InputError, match=r"no signal 'mean_wordlength', which index.mix names; source web has"):
        run_recipe(recipe(folder, score="mean_wordlength", sources=["web"]), folder / "work", "index")


def test_a_folder_without_cells_has_no_event(tmp_path):
    assert mix_events("0" * 32, tmp_path) == []
