"""Reader of Hugging Face datasets: from the hub, pinned by commit, or from a local folder, pinned by its files."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.readers.document import FieldMap, Record, Unreadable, first_line, too_large
from gristmill.data_pipeline.readers.files import check_digest
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import RawFile
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest


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


def read_dataset(source: SourceConfig, pinned: RawFile) -> Iterator[Record | Unreadable]:
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
        check_digest(dataset_digest(source)[1], pinned, source.paths[0])


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
