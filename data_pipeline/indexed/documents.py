"""The documents of a curated corpus, as the later stages read them: CORPUS/documents/SPLIT/SOURCE-00000.parquet."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.errors import InputError


@dataclass(frozen=True)
class RowGroup:
    """A slice of a source that is read at once. bytes: of the text column, uncompressed, as the file states it."""

    path: Path
    number: int
    documents: int
    bytes: int


def row_groups(corpus: Path, split: str, source: str) -> list[RowGroup]:
    """The source's documents in their canonical order: part by part, row group by row group. Empty if it has none.

    Raises InputError if a part is no Parquet file or has no column `text`."""
    found: list[RowGroup] = []
    for path in sorted((corpus / "documents" / split).glob(f"{source}-[0-9][0-9][0-9][0-9][0-9].parquet")):
        try:
            metadata = pq.read_metadata(path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: not a readable Parquet file ({error}); run `gristmill curate` again") from error
        names = metadata.schema.to_arrow_schema().names
        if "text" not in names:
            raise InputError(f"{path}: no column 'text', it has {names}; run `gristmill curate` again")
        column = _leaf_index(metadata, "text")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            size = group.column(column).total_uncompressed_size
            if group.num_rows:
                found.append(RowGroup(path, number, group.num_rows, size))
    return found


def read_columns(group: RowGroup, *columns: str) -> pa.Table:
    """Raises InputError if the row group cannot be read."""
    try:
        return pq.ParquetFile(group.path).read_row_group(group.number, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{group.path}: row group {group.number} cannot be read ({error}); curate again") from error


def _leaf_index(metadata: pq.FileMetaData, name: str) -> int:
    return next(index for index in range(metadata.num_columns) if metadata.schema.column(index).path == name)
