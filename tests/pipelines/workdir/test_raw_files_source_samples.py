"""What the first records of a source tell before any work."""

import pytest
from corpora import prose, write_jsonl

from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.pipelines.workdir.raw_files import look_at

RECIPE = """\
name: look
sources:
  - {name: web, format: jsonl, paths: [web.jsonl]%s}
  - {name: books, format: jsonl, paths: [books.jsonl], on_empty: %s}
curate: {languages: [%s], near_dedup: null, splits: {}}
"""


@pytest.fixture
def look(call, tmp_path, monkeypatch):
    """Checks the recipe in a folder with good web text: (exit code, what was said)."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(k)} for k in range(20)])

    def run(books, web_options="", on_empty="warn", languages="en", command="check"):
        if isinstance(books, bytes):
            (tmp_path / "books.jsonl").write_bytes(books)
        else:
            write_jsonl(tmp_path / "books.jsonl", books)
        (tmp_path / "look.yaml").write_text(RECIPE % (web_options, on_empty, languages))
        return call(command, "look.yaml", *(() if command == "curate" else ("--to", "curate")))

    return run


def test_a_field_that_no_record_has_names_the_nearest(look):
    code, said = look([{"id": 1, "txet": prose(1), "zzz": "y"}] * 3)
    assert code == 1 and "no field 'text'; fields are id, txet, zzz; set text_field of source books to 'txet'" in said
    assert look([{"id": 1, "txet": prose(1)}] * 3, command="curate")[0] == 1


def test_empty_files_and_other_languages_are_warned_of(look):
    code, said = look(b"")
    assert code == 0 and "warning: source books: the files looked at are empty (1 of 1)" in said
    german = "Die Mühle steht am Fluss und das Wasser dreht das Rad, damit das Korn gemahlen werden kann. " * 5
    code, said = look([{"text": german}] * 4)
    assert code == 0 and "the first 4 texts are de, and curate.languages keeps en alone; add de" in said
    assert "warning" not in look([{"text": prose(50)}])[1]


def test_a_source_that_must_not_be_empty_is_an_error(look):
    code, said = look(b"", on_empty="error")
    assert code == 1 and "the files looked at are empty" in said


def test_a_source_that_keeps_nothing_is_said_and_the_run_goes_on(look, tmp_path):
    code, said = look([{"text": "Too short."}] * 3, command="curate")
    assert code == 0, said
    assert "NOTHING KEPT: source books: of 3 documents none is left" in said
    assert (tmp_path / "work" / "look" / "curate" / "counts.json").is_file()


def test_such_a_source_may_stop_the_run(look):
    code, said = look([{"text": "Too short."}] * 4, on_empty="error", command="curate")
    assert code == 1 and "source books: of 4 documents none is left to train on" in said


def test_a_run_without_a_source_ends_with_a_model(call, tmp_path, monkeypatch):
    """One of two weighted sources keeps nothing and another is too short for a sample: both are said, and training
    goes on."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(k)} for k in range(60)])
    write_jsonl(tmp_path / "books.jsonl", [{"text": "Too short."}] * 3)
    write_jsonl(tmp_path / "note.jsonl", [{"text": prose(900 + k, 55)} for k in range(2)])
    (tmp_path / "three.yaml").write_text("""\
name: three
sources:
  - {name: web, format: jsonl, paths: [web.jsonl], weight: 0.5}
  - {name: books, format: jsonl, paths: [books.jsonl], weight: 0.3}
  - {name: note, format: jsonl, paths: [note.jsonl], weight: 0.2}
curate: {near_dedup: null, splits: {}}
tokenizer: {vocab_size: 300}
model: {layers: 1, width: 16, heads: 2, sequence_length: 1024}
train: {tokens: 4096, batch_tokens: 1024, precision: fp32, monitoring: {trackers: []}}
evaluate: {tasks: [bits_per_byte], num_continuations: 0}
""")
    code, said = call("run", "three.yaml", "--workers", 1, "--to", "train")
    assert code == 0, said
    assert "NOTHING KEPT: source books" in said and "NOT TRAINED ON: " in said


def test_a_field_inside_others_is_named_by_its_path(look):
    code, said = look([{"id": 1, "data": {"texts": prose(1)}}] * 3)
    assert code == 1 and "fields are data.texts, id; set text_field of source books to 'data.texts'" in said


def test_many_files_of_one_record_are_looked_at(tmp_path):
    """Three files are enough where each holds several records; of notes, more are read."""
    for number in range(100):
        (tmp_path / f"{number:03}.md").write_text(prose(number))
    notes = SourceConfig(name="notes", format="markdown", paths=(str(tmp_path),))
    sample = look_at(notes)
    assert sample is not None and (sample.files, sample.looked_at, len(sample.texts)) == (100, 24, 24)
    paragraphs = look_at(SourceConfig(name="notes", format="markdown", paths=(str(tmp_path),), record="line"))
    assert paragraphs is not None and paragraphs.looked_at == 3 and len(paragraphs.texts) == 24
