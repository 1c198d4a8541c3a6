"""The ledger and the signals of a corpus as DuckDB tables, for questions in SQL."""

from pathlib import Path

import duckdb

from gristmill.data_pipeline.explain import corpus_folder

TABLES = ("documents", "signals", "ledger")


def open_corpus(folder: Path) -> duckdb.DuckDBPyConnection:
    """A connection with the views documents, signals and ledger over the corpus's Parquet files, read only as asked.

    documents and signals have a column `split` besides; signals of sources whose filters edit have more columns than
    others, null where a source has them not. Raises InputError if there is no corpus in the folder."""
    corpus = corpus_folder(folder)
    connection = duckdb.connect()
    for name in TABLES:
        pattern = str(corpus / name / ("*.parquet" if name == "ledger" else "*/*.parquet")).replace("'", "''")
        split = "" if name == "ledger" else ", split_part(filename, '/', -2) AS split"
        columns = "*" if name == "ledger" else "* EXCLUDE (filename)"
        connection.execute(
            f"CREATE VIEW {name} AS SELECT {columns}{split} "
            f"FROM read_parquet('{pattern}', union_by_name = true, filename = {str(name != 'ledger').lower()})"
        )
    return connection
