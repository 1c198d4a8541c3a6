"""Facts of a work folder: the rows of a query with the SQL, the digests of the files it reads, and that of the rows."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.data_pipeline.readers.document import first_line
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.pipelines.provenance.summary.queries import HOSTS, Query

try:  # an optional extra
    import duckdb
    import tld
except ImportError as error:  # pragma: no cover
    raise InputError(f"gristmill summary needs the package {error.name}: pip install 'gristmill[papers]'") from None


class Fact(Config):
    """inputs: by glob of the work folder, the fingerprint of the paths and SHA-256 of its files. digest: the
    fingerprint of the rows."""

    name: str
    about: str
    query: str
    inputs: dict[str, str]
    rows: tuple[dict[str, Any], ...]
    digest: str


Facts = Mapping[str, Fact]


def compute_facts(workdir: Path, queries: Sequence[Query]) -> dict[str, Fact]:
    """The facts of the stages that are complete, by name. Raises InputError without a complete `curate`."""
    stages = {path.parent.name: read_manifest(path.parent) for path in sorted(workdir.glob(f"*/{MANIFEST_NAME}"))}
    if "curate" not in stages:
        raise InputError(f"{workdir}: no complete stage curate; run `gristmill run RECIPE` first")
    with duckdb.connect(config={"threads": 2, "file_search_path": str(workdir.absolute())}) as connection:
        signals = _columns(connection, workdir)
        connection.register("domain_of_host", _domains(connection, workdir))
        return {
            query.name: _fact(query, connection, workdir, stages)
            for query in queries
            if query.stage in ("", *stages) and set(query.columns) <= signals and _paths(workdir, query.reads[0])
        }


def _fact(query: Query, connection: Any, workdir: Path, stages: Mapping[str, Manifest]) -> Fact:
    try:
        rows = tuple(connection.sql(query.sql).to_arrow_table().to_pylist())
    except duckdb.Error as error:
        raise InputError(f"{workdir}: {query.name}: {first_line(error)}; `gristmill verify {workdir}`") from error
    inputs = {pattern: _input_digest(pattern, workdir, stages) for pattern in query.reads}
    return Fact(
        name=query.name,
        about=query.about,
        query=query.sql,
        inputs=inputs,
        rows=rows,
        digest=fingerprint(list(rows)),
    )


def _columns(connection: Any, workdir: Path) -> set[str]:
    """Names of all columns of the signals."""
    return {
        name
        for path in sorted(workdir.glob("curate/signals/*/*-00000.parquet"))
        for (name,) in connection.execute(
            "SELECT name FROM parquet_schema(?) WHERE num_children IS NULL", [str(path)]
        ).fetchall()
    }


def _domains(connection: Any, workdir: Path) -> pa.Table:
    """Host -> registered domain by the Public Suffix List that the package tld brings; a host without one is its own
    domain."""
    hosts = [row[0] for row in connection.execute(HOSTS.sql).fetchall()] if _paths(workdir, HOSTS.reads[0]) else []
    domains = [tld.get_fld(f"http://{host}", fail_silently=True) or host for host in hosts]
    return pa.table({"host": pa.array(hosts, pa.string()), "domain": pa.array(domains, pa.string())})


def _paths(workdir: Path, pattern: str) -> list[Path]:
    return sorted(workdir.glob(pattern))


def _input_digest(pattern: str, workdir: Path, stages: Mapping[str, Manifest]) -> str:
    """The fingerprint of [path, SHA-256] of the files, as the stage's manifest has them; lock and manifests are
    digested here."""
    stage, slash, inner = pattern.partition("/")
    if not slash or inner == MANIFEST_NAME:
        return fingerprint([[pattern, file_digest(workdir / pattern)]])
    outputs = [[f"{stage}/{o.path}", o.sha256] for o in stages[stage].outputs if fnmatchcase(o.path, inner)]
    return fingerprint(sorted(outputs))


def differing_facts(written: Facts, computed: Facts) -> list[str]:
    """One line for each fact that is not what the summary says."""
    lines = []
    for name in sorted(written.keys() | computed.keys()):
        before, now = written.get(name), computed.get(name)
        if before is None or now is None:
            lines.append(f"{name}: {'not in the summary' if before is None else 'cannot be computed any more'}")
        elif fingerprint(list(before.rows)) != before.digest:
            lines.append(f"{name}: its rows in the summary do not have its digest {before.digest}")
        elif before.digest != now.digest:
            lines.append(f"{name}: rows {before.digest} in the summary, {now.digest} now")
        elif before.inputs != now.inputs or before.query != now.query:
            lines.append(f"{name}: the same rows from other files or another query")
    return lines
