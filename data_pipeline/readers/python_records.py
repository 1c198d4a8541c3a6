"""Readers of records that Python yields: Hugging Face datasets, and a function of a recipe's Python file."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.data_pipeline.readers.compression import Damaged, blocks, without_surrogates
from gristmill.data_pipeline.readers.document import Record, Unreadable, first_line, too_large
from gristmill.data_pipeline.readers.files import check_digest
from gristmill.data_pipeline.readers.source import FieldMap, SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile
from gristmill.foundation.user_code import defined_at, errors_named, parameter_names

# Hugging Face datasets: from the hub, pinned by commit, or from a local folder, pinned by its files.


def dataset_digest(source: SourceConfig) -> tuple[int, str]:
    """Return (bytes, digest) that pin the dataset. Bytes are 0 for a dataset on the hub.

    Raises InputError if it is neither a local folder nor pinned by a commit: the data behind a hub name may change."""
    folder = Path(source.paths[0])
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        joined = "\n".join(file_digest(path) for path in files)
        return sum(path.stat().st_size for path in files), hashlib.sha256(joined.encode()).hexdigest()
    if not re.fullmatch(r"[0-9a-f]{40}", source.revision or ""):
        raise InputError(
            f"source {source.name}: {source.paths[0]} is not a local folder, and a hub dataset needs a commit; "
            "set revision to its 40 hex digits"
        )
    return 0, hashlib.sha256(f"hub {source.paths[0]} {source.revision}".encode()).hexdigest()


def read_dataset(source: SourceConfig, locked: RawFile) -> Iterator[Record | Unreadable]:
    """The rows of the source's split, streamed. Rows with strings over max_record_bytes are not read; the rows after
    an unreadable row are lost and reported.

    Raises InputError after the last row if the files of a local folder are not those in the lock: the library maps them
    into memory, so they are digested again at the end. A change that was undone in between is not detected."""
    fields, limit = FieldMap(source), source.max_record_bytes
    number = 0
    rows = iter(_open(source))
    while True:
        try:
            row = dict(next(rows))
        except StopIteration:
            break
        except Exception as error:  # the library's readers raise various errors
            reason = f"{type(error).__name__}: {first_line(error)}; the rows after it are lost"
            yield Unreadable(number, "damaged", reason)
            break
        size = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
        yield too_large(number, size, limit) if size > limit else fields.record(row, number, -1)
        number += 1
    if Path(source.paths[0]).is_dir():
        check_digest(dataset_digest(source)[1], locked, source.paths[0])


def _open(source: SourceConfig) -> Iterable[Mapping[str, Any]]:
    import datasets  # loaded here: every worker process would wait for it, and few sources need it

    path = source.paths[0]
    try:
        if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(path)
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(path, split=source.split, revision=source.revision, streaming=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"source {source.name}: {path} cannot be opened: {first_line(error)}; check the path, split and revision"
        ) from error


# Reader of the user's own: a function of a recipe's Python file that yields the documents of a raw file.


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
