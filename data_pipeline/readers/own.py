"""Reader of the user's own: a function of a recipe's Python file that yields the documents of a raw file."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from gristmill.data_pipeline.readers.compression import Damaged, blocks, without_surrogates
from gristmill.data_pipeline.readers.document import FieldMap, Record, Unreadable, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import defined_at, errors_named, parameter_names

PARAMETERS = ("content", "name")


def reader_of(source: SourceConfig) -> Callable[[bytes, str], Any]:
    """The function. Raises RecipeError if it does not load, is no generator function, or has other parameters."""
    assert source.reader is not None
    field = _field(source)
    function = source.reader.load(field)
    with errors_named(field, "has no signature", source.reader.file):
        names = parameter_names(function)
    if names != PARAMETERS or not inspect.isgeneratorfunction(function):
        raise RecipeError(
            f"{field}: {defined_at(function)}: {source.reader.function}({', '.join(names)}) must be a function "
            f"({', '.join(PARAMETERS)}) that yields documents: texts, or dictionaries with the source's fields"
        )
    return function


def read_own(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The documents that the function yields for the file's bytes, decompressed by the file's suffix.

    A document is a text, or a dictionary that the source's text_field, url_field and metadata_fields are read from; one
    without text is Unreadable, and so is one over max_record_bytes. Raises RecipeError with file and line of an error
    of the function."""
    function, fields = reader_of(source), FieldMap(source)
    try:
        content = b"".join(blocks(file, name))
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))
        return
    documents = iter(function(content, name))
    number = 0
    while True:
        with errors_named(_field(source), f"fails on {name}, document {number}", defined_at(function)):
            document = next(documents, None)
        if document is None:
            return
        if not isinstance(document, str | dict):
            kind = type(document).__name__
            raise RecipeError(
                f"{_field(source)}: {defined_at(function)}: yielded a {kind}; yield texts, or dictionaries with the "
                "source's fields"
            )
        record = fields.record({source.text_field: document} if isinstance(document, str) else document, number, -1)
        size = len(record.text.encode("utf-8", "surrogatepass")) if isinstance(record, Record) else 0
        if isinstance(record, Record) and size <= source.max_record_bytes:
            yield record._replace(text=without_surrogates(record.text))
        else:
            yield record if isinstance(record, Unreadable) else too_large(number, size, source.max_record_bytes)
        number += 1


def _field(source: SourceConfig) -> str:
    return f"source {source.name}.reader"
