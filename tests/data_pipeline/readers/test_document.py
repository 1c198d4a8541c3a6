"""Records from fields: texts inside other fields, and parts of addresses."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.readers.document import Record, Unreadable, split_url
from gristmill.data_pipeline.readers.read import records_of
from gristmill.data_pipeline.readers.source import FieldMap, SourceConfig


def source(field, format="jsonl"):
    return SourceConfig(name="t", format=format, paths=("x",), text_field=field)


def test_parts_of_an_address():
    assert split_url("HTTPS://me@A.b:80/C?d") == ("a.b", "/C?d")
    assert split_url("a.b") == ("a.b", "") and split_url("http://a.b?q") == ("a.b", "?q")


NESTED = {"id": 7, "a": {"b": "x", "c": [1]}}
CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}, "z"]}


@pytest.mark.parametrize(
    "field, fields, text, metadata",
    [
        ("a.b", NESTED, "x", {"id": 7, "a": {"c": [1]}}),
        ("messages.content", CHAT, "x\n\ny", {"messages": [{"role": "user"}, {"role": "bot"}, "z"]}),
        ("a.b", {"a.b": "whole name", "a": {"b": "x"}}, "whole name", {"a": {"b": "x"}}),
    ],
)
def test_a_text_inside_other_fields(field, fields, text, metadata, tmp_path):
    """As a record, and as columns of JSON lines and of Parquet."""
    assert FieldMap(source(field)).record(fields, 3, 0) == Record(3, text, metadata=metadata)
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text(json.dumps(fields) + "\n")
    assert [record.text for record in records_of(str(lines), source(field))] == [text]
    if field != "messages.content":  # Parquet's lists hold one type
        pq.write_table(pa.Table.from_pylist([fields]), table)
        assert [record.text for record in records_of(str(table), source(field, "parquet"))] == [text]


def test_names_of_fields_inside_others_are_in_the_message():
    refused = FieldMap(source("body")).record({**NESTED, **CHAT}, 0, 0)
    assert isinstance(refused, Unreadable)
    assert "fields are a.b, a.c, id, messages.content, messages.role; set text_field" in refused.reason
