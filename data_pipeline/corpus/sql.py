"""The ledger and the signals of a corpus as DuckDB tables, for questions in SQL."""

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.data_pipeline.corpus.document_history import corpus_folder
from gristmill.foundation.addresses import as_os_errors, filesystem_of
from gristmill.foundation.checked_outputs import check_outputs
from gristmill.foundation.errors import InputError

if TYPE_CHECKING:
    import duckdb

TABLES = ("documents", "signals", "ledger")


def open_corpus(folder: Path) -> "duckdb.DuckDBPyConnection":
    """A connection with the views documents, signals and ledger over the corpus's Parquet files, read only as asked.

    documents and signals have a column `split` besides; signals of sources whose filters edit have more columns than
    others, null where a source has them not. Raises InputError if there is no corpus in the folder."""
    import duckdb  # loaded here: no other command needs it

    corpus = corpus_folder(folder)
    check_outputs(corpus, lambda path: path.startswith("ledger/"))
    connection = duckdb.connect()
    _create_views(connection, glob.escape(str(corpus)), str(corpus))
    return connection


def open_address(corpus: str) -> "duckdb.DuckDBPyConnection":
    """As `open_corpus`, of the folder at an address. DuckDB reads the columns and row groups that a query needs,
    through fsspec and so with the credentials of the environment."""
    import duckdb  # as above

    connection = duckdb.connect()
    connection.register_filesystem(filesystem_of(corpus)[0])
    with as_os_errors():
        _create_views(connection, corpus, corpus)
    return connection


def _create_views(connection: "duckdb.DuckDBPyConnection", root: str, corpus: str) -> None:
    """root: the corpus as a glob pattern."""
    import duckdb  # as above

    for name in TABLES:
        files = "*.parquet" if name == "ledger" else "*/*.parquet"
        pattern = f"{root}/{name}/{files}".replace("'", "''")
        split = "" if name == "ledger" else ", split_part(filename, '/', -2) AS split"
        columns = "*" if name == "ledger" else "* EXCLUDE (filename)"
        view = (
            f"CREATE VIEW {name} AS SELECT {columns}{split} "
            f"FROM read_parquet('{pattern}', union_by_name = true, filename = {str(name != 'ledger').lower()})"
        )
        try:
            connection.execute(view)
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            raise InputError(f"{corpus}/{name}: {said}; `gristmill verify {corpus}` lists what is damaged") from error
