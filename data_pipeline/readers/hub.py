"""Hugging Face datasets: one on the hub, pinned by its commit, or a local folder, pinned by its files."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.document import Record, Unreadable
from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.provenance.files import file_digest
from gristmill.data_pipeline.readers.fields import FieldMap
from gristmill.data_pipeline.readers.source import SourceConfig


def dataset_digest(source: SourceConfig) -> tuple[int, str]:
    """(bytes, digest) that pin the dataset. Bytes are 0 for one on the hub.

    Raises InputError if it is neither a folder nor pinned: a hub name alone may mean other data tomorrow."""
    folder = Path(source.paths[0])
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        joined = "\n".join(file_digest(path) for path in files)
        return sum(path.stat().st_size for path in files), hashlib.sha256(joined.encode()).hexdigest()
    if not re.fullmatch(r"[0-9a-f]{40}", source.revision or ""):
        raise InputError(
            f"source {source.name}: {source.paths[0]} is no folder here, and a dataset on the hub is read at a commit; "
            "set revision to its 40 hex digits"
        )
    return 0, hashlib.sha256(f"hub {source.paths[0]} {source.revision}".encode()).hexdigest()


def read_dataset(source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The rows of the source's split, streamed."""
    fields = FieldMap(source)
    for number, row in enumerate(_open(source)):
        yield fields.record(dict(row), number, -1)


def _open(source: SourceConfig) -> Iterable[Mapping[str, Any]]:
    import datasets  # loaded here: every worker process would wait for it, and few sources need it

    path = source.paths[0]
    try:
        if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(path)
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(path, split=source.split, revision=source.revision, streaming=True)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"source {source.name}: {path} cannot be opened: {first}") from error
