"""User errors: one message with the name and the fix, no traceback."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

RECIPE = """\
name: small
sources:
  - {{name: notes, format: {format}, paths: ["{folder}/*"]}}
curate: {{splits: {{validation: 0.1, test: 0.1}}, filters: [], near_dedup: null}}
tokenizer: {{vocab_size: 400}}
model: {{layers: 1, width: 16, heads: 2, sequence_length: 32}}
train: {{tokens: 4096, batch_tokens: 256, precision: fp32, validation: {{every: 0}}}}
"""
WORDS = ["miller", "grain", "stones", "flour", "sack", "wheel", "water", "hopper", "bran", "sieve", "dust", "weight"]


def text_of(number: int) -> str:
    return " ".join(WORDS[(number * 7 + index * (number % 5 + 1)) % len(WORDS)] + str(number) for index in range(60))


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    return folder


def write_recipe(tmp_path, raw, form="jsonl", changed=("", "")):
    text = RECIPE.format(format=form, folder=raw)
    assert changed[0] in text
    (tmp_path / "small.yaml").write_text(text.replace(*changed, 1))


def jsonl_lines(count=40):
    return [json.dumps({"text": text_of(number)}).encode() for number in range(count)]


def counts(tmp_path):
    return json.loads((tmp_path / "work/small/curate/counts.json").read_bytes())["sources"]["notes"]


def quarantine(tmp_path):
    lines = (tmp_path / "work/small/curate/quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_lines_that_are_no_records_are_quarantined_counted_and_named(call, tmp_path, raw):
    bad = [b"not json", b"[1, 2]", b'{"body": "no text"}', b'{"text": 7}', b'{"text": "\xff\xfe"}']
    (raw / "a.jsonl").write_bytes(b"\n".join([*jsonl_lines(), *bad]) + b"\n")
    write_recipe(tmp_path, raw)
    code, message = call("curate", "small.yaml")
    assert code == 0
    assert sum(each["documents"] for each in counts(tmp_path)["quarantined"].values()) == len(bad)
    assert [line["record"] for line in quarantine(tmp_path)] == [40, 41, 42, 43, 44]
    assert all(line["reason"] for line in quarantine(tmp_path))
    assert "5 quarantined" in message
    assert "quarantine: source notes, a.jsonl, record 40:" in message


@pytest.mark.parametrize(
    ("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.ZstdCompressor().compress)]
)
def test_a_truncated_archive_is_read_as_far_as_it_goes(call, tmp_path, raw, name, pack):
    lines = jsonl_lines(400)
    packed = pack(b"\n".join(lines) + b"\n")
    (raw / name).write_bytes(packed[: 2 * len(packed) // 3])
    (raw / "b.jsonl").write_bytes(b"\n".join(lines[:30]) + b"\n")
    write_recipe(tmp_path, raw)
    code, _ = call("curate", "small.yaml")
    assert code == 0
    lines = quarantine(tmp_path)
    assert len(lines) == 1
    assert lines[0]["source"] == "notes"
    assert "truncated" in lines[0]["reason"] or "ends" in lines[0]["reason"] or "damaged" in lines[0]["reason"]


def test_a_truncated_parquet_file_is_quarantined(call, tmp_path, raw):
    pq.write_table(pa.table({"text": [text_of(number) for number in range(40)]}), raw / "good.parquet")
    (raw / "bad.parquet").write_bytes((raw / "good.parquet").read_bytes()[:-50])
    write_recipe(tmp_path, raw, "parquet")
    code, _ = call("curate", "small.yaml")
    assert code == 0
    assert len(quarantine(tmp_path)) == 1


def test_an_empty_source(call, tmp_path, raw):
    (raw / "a.jsonl").write_bytes(b"")
    write_recipe(tmp_path, raw)
    code, message = call("curate", "small.yaml")
    assert code == 1
    assert "source notes: the files looked at are empty (1 of 1)" in message


def test_a_source_emptied_by_the_filters_says_by_which_rule(call, tmp_path, raw):
    (raw / "a.jsonl").write_bytes(b"\n".join(jsonl_lines()) + b"\n")
    write_recipe(tmp_path, raw, changed=("filters: []", "filters: [{gopher_quality: {min_words: 1000}}]"))
    code, message = call("curate", "small.yaml")
    assert code == 1
    assert "gopher_quality.min_words removed 40" in message


def test_a_vocabulary_larger_than_the_corpus_supports(call, tmp_path, raw):
    (raw / "a.jsonl").write_bytes(b"\n".join(jsonl_lines()) + b"\n")
    write_recipe(tmp_path, raw, changed=("400", "30000"))
    code, message = call("run", "small.yaml", "--to", "tokenizer")
    assert code == 1
    assert "vocab_size" in message and "30000" in message


def test_a_context_longer_than_the_data(call, tmp_path, raw):
    (raw / "a.jsonl").write_bytes(b"\n".join(jsonl_lines()) + b"\n")
    changed = ("sequence_length: 32", "sequence_length: 1000000")
    write_recipe(tmp_path, raw, changed=changed)
    text = (tmp_path / "small.yaml").read_text()
    (tmp_path / "small.yaml").write_text(
        text.replace("tokens: 4096, batch_tokens: 256", "tokens: 2M, batch_tokens: 1M")
    )
    code, message = call("run", "small.yaml", "--to", "train")
    assert code == 1
    assert "set model.sequence_length to" in message
