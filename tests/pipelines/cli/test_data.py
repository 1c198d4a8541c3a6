"""The commands `gristmill data` and `gristmill tokenizer compare` as a user calls them."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.data import data_app, tokenizer_compare
from tests.support.indexed_files import write_documents


def run(*arguments: object) -> str:
    result = CliRunner().invoke(data_app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_datasets_are_shown_merged_cut_and_appended(tmp_path):
    write_documents(tmp_path / "a", [[1, 2, 3], [4]], np.uint16)
    write_documents(tmp_path / "b", [[5, 6]], np.uint16)
    assert "2 documents, 2 sequences, 4 tokens" in run("inspect", tmp_path / "a")
    run("merge", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "c")
    run("append", tmp_path / "b", tmp_path / "a")
    run("slice", tmp_path / "c", "--output", tmp_path / "d", "--first", 1, "--last", 3)
    content = {name: [d.tolist() for d in IndexedReader(tmp_path / name).documents()] for name in "bcd"}
    assert content == {"b": [[5, 6], [1, 2, 3], [4]], "c": [[1, 2, 3], [4], [5, 6]], "d": [[4], [5, 6]]}


def test_a_bare_name_in_its_own_folder_is_a_prefix(tmp_path, monkeypatch):
    write_documents(tmp_path / "a", [[1, 2, 3], [4]], np.uint16)
    write_documents(tmp_path / "b", [[5, 6]], np.uint16)
    monkeypatch.chdir(tmp_path)
    assert "2 documents, 2 sequences, 4 tokens" in run("inspect", "a")
    run("merge", "a", "b", "--output", "c")
    run("append", "b", "a")
    run("slice", "c", "--output", "d", "--first", 1, "--last", 3)
    content = {name: [d.tolist() for d in IndexedReader(tmp_path / name).documents()] for name in "bcd"}
    assert content == {"b": [[5, 6], [1, 2, 3], [4]], "c": [[1, 2, 3], [4], [5, 6]], "d": [[4], [5, 6]]}


def test_compare_prints_both_tables(tmp_path, small_corpus):
    path = tmp_path / "texts.jsonl"
    with path.open("w") as file:
        for number, source in enumerate(sorted(small_corpus.glob("[a-d]*.txt"))):
            file.write(json.dumps({"text": source.read_text(), "language": ["en", "de"][number % 2]}) + "\n")
    app = typer.Typer()
    app.command()(tokenizer_compare)
    arguments = [str(path), "--presets", "characters", "--vocab-size", "600", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "characters" in result.output
    assert "parity" in result.output
    with pytest.raises(RecipeError, match="nothing to compare"):
        CliRunner().invoke(app, [str(path), "--presets", ""], catch_exceptions=False)
