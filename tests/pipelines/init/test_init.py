"""From a folder of a user's files to a scored model: twelve unlike folders, and what `init` says of others."""

import bz2
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import prose
from user_folders import FOLDERS, compressed, csv_table, german, mailbox, notes, saved_pages, write

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.start import recipe_name
from gristmill.pipelines.init import dial, first_look
from gristmill.pipelines.init.dial import (
    Choice,
    ModelSize,
    Setting,
    TrainingRehearsal,
    choose_by_depth,
    choose_by_flops,
    choose_by_minutes,
    optimizer_of,
    rate_at_width,
)
from gristmill.pipelines.init.first_look import CurationRehearsal, read_forecast, rehearsed_sources
from gristmill.pipelines.init.recipe import plan_sources
from gristmill.pipelines.init.survey import survey
from gristmill.pipelines.recipes.recipe_file import load_recipe

REHEARSED = TrainingRehearsal(2000.0, 3.0, {"evaluate": 4.0, "report": 2.0})


@pytest.fixture
def known_machine(monkeypatch):
    """A machine whose rates are known, so that nothing is measured or rehearsed: 2e10 floating-point operations a
    second, 4 seconds for curation, 6 for evaluation."""

    def curated(sources, write_recipe, folder, reporter):
        write_recipe(sources, 1)
        text_bytes = sum(source.text_bytes for source in sources)
        return CurationRehearsal(1.0, {"curate": 2.0, "tokenizer": 1.0, "index": 1.0}, text_bytes, text_bytes / 3.3)

    monkeypatch.setattr(dial, "measured_rate", lambda size, precision: 2e10 / (6 * size.parameters))
    monkeypatch.setattr(first_look, "rehearse_curation", curated)
    monkeypatch.setattr(first_look, "rehearse_training", lambda *_: REHEARSED)


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_a_recipe_of_each_folder_is_valid(make, call, tmp_path, monkeypatch, known_machine):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "mine")
    code, said = call("init", "mine", "--minutes", 2, "--price", 3)
    assert code == 0 and "now: gristmill run mine.yaml" in said and "costs 0." in said
    recipe = load_recipe("mine.yaml")
    assert recipe.train is not None and len(recipe.sources) == 1
    forecast = read_forecast(Path("mine.yaml").read_text("utf-8"))
    assert list(forecast) == ["start", "curate", "tokenizer", "index", "train", "evaluate", "report"]
    assert sum(forecast.values()) < 121
    assert call("check", "mine.yaml")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_each_folder_becomes_a_scored_model_without_an_edit(make, call, tmp_path, monkeypatch, known_machine):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "mine")
    assert call("init", "mine", "--budget", 1e10)[0] == 0
    code, said = call("run", "mine.yaml", "--workers", 1)
    assert code == 0, said
    assert "bits_per_byte" in (tmp_path / "work" / "mine" / "evaluate" / "table.md").read_text()


def test_a_mixed_folder_becomes_a_scored_model_that_answers(call, tmp_path, monkeypatch, known_machine):
    """Six kinds of files at once, with what is none beside them."""
    monkeypatch.chdir(tmp_path)
    for make in (notes, mailbox, csv_table, compressed, german, saved_pages):
        make(tmp_path / "mine" / make.__name__)
    write(tmp_path / "mine" / "photo.png", b"\x89PNG\r\n\x1a\n" + bytes(100))
    write(tmp_path / "mine" / "empty.txt", b"")
    code, said = call("init", "mine", "--budget", 1e10)
    assert code == 0 and "a PNG picture" in said and "1 empty file," in said, said
    assert [source.format for source in load_recipe("mine.yaml").sources] == [
        "csv", "html", "jsonl", "markdown", "mbox", "text",
    ]  # fmt: skip
    code, said = call("run", "mine.yaml", "--workers", 1)
    assert code == 0, said
    lines = ["The mill", ""]
    monkeypatch.setattr("builtins.input", lambda prompt: lines.pop(0))
    code, said = call("chat", "work/mine", "--tokens", 4)
    assert code == 0 and "a base model" in said
    code, said = call("chat", "work/mine", "--seed", 2**63)
    assert code == 2 and "seed: Input should be less than 9223372036854775808" in said


def test_what_cannot_become_a_recipe_is_said(call, tmp_path, monkeypatch, known_machine):
    monkeypatch.chdir(tmp_path)
    code, said = call("init", "absent")
    assert code == 1 and said.endswith("gristmill: absent: no such folder; name the folder that holds your files")
    (tmp_path / "mine").mkdir()
    code, said = call("init", "mine")
    assert code == 1 and "holds no file that gristmill reads as text (no files)" in said
    write(tmp_path / "mine" / "a.txt", "too little")
    code, said = call("init", "mine")
    assert code == 1 and "bytes of text are left after curation" in said
    notes(tmp_path / "mine")
    code, said = call("init", "mine", "--minutes", 5, "--depth", 4)
    assert code == 2 and "give one of --minutes, --depth and --budget" in said
    assert call("init", "mine", "--depth", 2)[0] == 0
    before = (tmp_path / "mine.yaml").read_bytes()
    code, said = call("init", "mine", "--depth", 3)
    assert code == 2 and "mine.yaml exists" in said and (tmp_path / "mine.yaml").read_bytes() == before


def notebooks(folder: Path) -> None:
    for number in range(60):
        cells = [{"cell_type": "markdown", "source": prose(number)}, {"cell_type": "code", "source": "x = 1"}]
        write(folder / f"{number}.ipynb", json.dumps({"nbformat": 4, "cells": cells}))


def test_word_documents_and_notebooks_are_sources(call, tmp_path, monkeypatch, known_machine):
    docx = pytest.importorskip("docx", reason="docx needs the extra `documents`")
    monkeypatch.chdir(tmp_path)
    notebooks(tmp_path / "mine")
    letters = [docx.Document() for _ in range(10)]
    for number, letter in enumerate(letters):
        letter.add_paragraph(prose(100 + number))
        letter.save(tmp_path / "mine" / f"letter {number}.docx")
    write(tmp_path / "mine" / "table.xlsx", b"PK\x03\x04" + bytes(100))
    code, said = call("init", "mine", "--minutes", 2)
    assert code == 0 and "1 file of other kinds (a ZIP archive (or an Office document))" in said, said
    assert [source.format for source in load_recipe("mine.yaml").sources] == ["docx", "ipynb"]
    planned = plan_sources(survey(Path("mine")).groups[:1])  # the letters
    for source in planned:
        text_bytes = sum(len(text.encode()) for text in source.group.texts)  # all are in the sample
        assert source.text_bytes == pytest.approx(text_bytes * source.kept)
    monkeypatch.setattr(first_look, "MIN_RAW_BYTES", 1.0)
    monkeypatch.setattr(first_look, "TEXT_BYTES", 10.0)
    for source in rehearsed_sources(planned, tmp_path / "part"):  # whole files: documents are not cut
        assert len(source.group.paths) == 1 and source.group.paths[0].parent == Path("mine")


def test_sources_of_latex_and_xml_dumps_are_told_from_text(call, tmp_path, monkeypatch, known_machine):
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    pages = "".join(
        f"<page><title>{k}</title><ns>0</ns><revision><text>[[A]] {prose(k)}</text></revision></page>\n"
        for k in range(60)
    )
    rows = "".join(f'<row Id="{k}" PostTypeId="1" Body="&lt;p&gt;{prose(k)}&lt;/p&gt;" />\n' for k in range(60))
    write(mine / "dump.xml.bz2", bz2.compress(f"<mediawiki>\n{pages}</mediawiki>".encode()))
    write(mine / "Posts.xml", f'\ufeff<?xml version="1.0"?>\n<!-- all -->\n<posts>\n{rows}</posts>')
    write(mine / "feed.xml", '<?xml version="1.0"?>\n<rss><channel><title>A</title></channel></rss>')
    write(mine / "letter.rtf", r"{\rtf1\ansi A letter.}")
    write(mine / ".cache" / "a.txt", prose(1))
    for k in range(60):
        write(mine / "thesis" / f"{k}.tex", (r"\section{Über}" + f"\n{prose(k)}").encode("latin-1"))
        write(mine / "thesis" / f"{k}.txt", f"Un café.\n\n{prose(k)}".encode("latin-1"))
        write(mine / "thesis" / f"{k} es.txt", f"Mañana.\n\n{prose(k)}".encode("latin-1"))
        write(mine / "saved" / f"{k}", f"<!DOCTYPE html>\n<html><body><p>{prose(k)}</p></body></html>")
    code, said = call("init", "mine", "--minutes", 2)
    assert code == 0, said
    sources = {source.format: source for source in load_recipe("mine.yaml").sources}
    assert list(sources) == ["html", "latex", "mediawiki", "stack_exchange", "text"]
    assert sources["latex"].encoding == sources["text"].encoding == "cp1252"
    for kind, example in {
        "1 XML file of a kind that is not known here (they begin with <rss>)": "feed.xml",
        "1 file of other kinds (an RTF document)": "letter.rtf",
        "1 hidden folder": ".cache",
    }.items():
        assert f"not used: {kind}, such as mine/{example}" in said
    for group in survey(mine).groups[2:4]:  # the part of a dump that is rehearsed ends as whole ones do
        head = first_look._head_of(group.paths[0], group.format, 6000, tmp_path / "heads")
        assert head.stat().st_size < 6100
    heads = survey(tmp_path / "heads").groups
    assert [(group.kind, 5 < len(group.texts) < 20, group.problems) for group in heads] == [
        ("mediawiki", True, ()),
        ("stack_exchange", True, ()),
    ]


def test_a_format_whose_package_is_not_installed_is_not_used_and_said(call, tmp_path, monkeypatch, known_machine):
    monkeypatch.chdir(tmp_path)
    for name in ("docx", "pypdfium2"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    write(tmp_path / "mine" / "letter.docx", b"PK\x03\x04" + bytes(100))
    write(tmp_path / "mine" / "paper.pdf", b"%PDF-1.4")
    hint = "(format {} needs the package {}: pip install 'gristmill[documents]'), such as mine/{}"
    hints = [hint.format("docx", "python-docx", "letter.docx"), hint.format("pdf", "pypdfium2", "paper.pdf")]
    code, said = call("init", "mine")
    assert code == 1 and all(f"1 file {line}" in said for line in hints), said
    notebooks(tmp_path / "mine")
    code, said = call("init", "mine", "--minutes", 2)
    assert code == 0 and all(f"not used: 1 file {line}" in said for line in hints), said
    assert [source.format for source in load_recipe("mine.yaml").sources] == ["ipynb"]


def setting(text_bytes: float, overhead: float = 20.0) -> Setting:
    return Setting(text_bytes, text_bytes / 3.3, 4096, "bf16", overhead)


def test_one_dial(known_machine):
    """More minutes make a deeper model of more tokens, never with less than the asked share of the time."""
    choices = [choose_by_minutes(minutes, setting(1e8)) for minutes in (2, 5, 10, 20, 60)]
    assert all(a.size.depth <= b.size.depth and a.tokens < b.tokens for a, b in pairwise(choices))
    for minutes, choice in zip((2, 5, 10, 20, 60), choices, strict=True):
        assert choice.total_seconds <= 60 * minutes * 1.02
    by_depth = choose_by_depth(4, setting(1e9))
    assert by_depth.tokens == pytest.approx(20 * ModelSize(4, 4096, 256).parameters, rel=0.01)
    by_flops = choose_by_flops(1e15, setting(1e9))
    assert by_flops.flops == pytest.approx(1e15, rel=0.02)
    assert by_flops.size.parameters <= (1e15 / 120) ** 0.5
    with pytest.raises(RecipeError, match=r"give at least 1\.5 minutes"):
        choose_by_minutes(1, setting(1e8, overhead=70))


def test_rates_of_tables_go_with_the_root_of_the_width_and_muons_stays():
    """Width 192 is a quarter of 768, so that the embedding's 0.2 there is 0.4 here."""
    assert rate_at_width("embedding_learning_rate", 0.2, 192 / 768) == pytest.approx(0.4)
    written = optimizer_of(ModelSize(3, 2048, 256))
    assert (written["embedding_learning_rate"], written["head_learning_rate"]) == (0.4, 0.008)
    assert written["muon_learning_rate"] == optimizer_of(ModelSize(12, 2048, 256))["muon_learning_rate"] == 0.03


def test_a_rehearsal_decides_the_tokens():
    """Of 100 s, 4 before training, 3 beside its steps and 5 after it: 88 s at 1,000 tokens a second."""
    before = {"start": 1.0, "curate": 3.0}
    training = TrainingRehearsal(1000.0, 3.0, {"evaluate": 4.0, "report": 1.0})
    size = ModelSize(2, 384, 256)
    choice = Choice(size, 122_880, dial.batch_of(size), 5000.0, 1.0, {}, "")
    by_time = dial.rehearsed(choice, setting(1e8), before, training, 100 / 60)
    assert by_time.tokens == 88_000 // 4096 * 4096
    assert by_time.seconds["train"] == pytest.approx(3 + by_time.tokens / 1000)
    assert dial.rehearsed(choice, setting(1e8), before, training, None).tokens == choice.tokens


def test_a_vocabulary_has_room_for_the_characters(call, tmp_path, monkeypatch, known_machine):
    """2,000 characters of Chinese need more pieces than so little text has in other languages."""
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        characters = "".join(chr(0x4E00 + (number * 97 + k * 13) % 2000) for k in range(300))
        write(tmp_path / "mine" / f"{number}.txt", characters)
    assert call("init", "mine", "--depth", 2)[0] == 0
    assert 272 + 1.3 * 1900 < load_recipe("mine.yaml").tokenizer.vocab_size < 4096


def test_names():
    assert [recipe_name(text) for text in ("My Notes!", "2024", "水車", "a" * 99)] == [
        "my_notes",
        "2024",
        "corpus",
        "a" * 60,
    ]
