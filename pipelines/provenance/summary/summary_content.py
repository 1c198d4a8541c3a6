"""Content of the papers: facts, answers and the chain of fingerprints, and how Markdown shows them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.readers.document import first_line
from gristmill.foundation.config import Config, read_yaml
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.pipelines.provenance.summary.queries import HOSTS, Query
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import validate_config

MARKDOWN_SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "\\|<>*_`[]"})


class Reservation(Config):
    """A file of robots.txt records or opt-outs that the recipe applies, and the days of its records."""

    list: str
    sha256: str
    first: str
    last: str


# Facts of a work folder: the rows of a query with the SQL, the digests of the files it reads, and that of the rows.

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


# PaperAnswers that only a person can give: a YAML file with one field for each question that the papers ask.

ANSWERS_NAME = "answers.yaml"
Category = Literal["public_dataset", "licensed", "private_third_party", "crawled", "user_data", "synthetic", "other"]


OF_CATEGORY = {"crawler": "crawled", "generator": "synthetic"}  # question -> the kind of source that it is asked of


def _question(text: str) -> Any:
    return Field(default=None, description=text)


class SourceAnswers(Config):
    """PaperAnswers about one source of the recipe."""

    category: Category | None = _question("which kind of source it is in section 2 of the Commission's template")
    title: str | None = _question("name of the dataset, or of whoever it came from")
    link: str | None = _question("where it can be obtained")
    license: str | None = _question("licence of the documents whose record names none")
    description: str | None = _question("what it holds and how it was chosen")
    collected: str | None = _question("period of collection, where the documents have no date of their own")
    crawler: str | None = _question("crawled: name and operator of the crawler, its purposes and behaviour")
    generator: str | None = _question("synthetic: the model that wrote it, and from what")


class PaperAnswers(Config):
    """PaperAnswers about the provider, the model and the corpus; null is an open question."""

    provider: str | None = _question("name and contact of the provider")
    representative: str | None = _question("authorized representative in the Union, or `none`")
    small_provider: bool | None = _question("whether the provider is a small or medium-sized enterprise")
    model_name: str | None = _question("name and version of the model as it is published")
    model_dependencies: str | None = _question("the general-purpose model that this one was made from, or `none`")
    market_date: str | None = _question("date on which the model was placed on the Union market")
    types_of_content: str | None = _question("types of text: fiction, scientific, legal, press, source code ...")
    still_collecting: str | None = _question("whether data are still collected, and the model trained on them")
    code_of_practice: bool | None = _question("whether the provider signed the Code of Practice")
    opt_out_policy: str | None = _question("copyright policy and measures to respect reservations of rights")
    illegal_content: str | None = _question("measures against illegal content in the training data")
    intended_use: str | None = _question("what the corpus and the model are meant for")
    limitations: str | None = _question("known limitations and biases")
    corpus_license: str | None = _question("licence under which the corpus is published")
    model_license: str | None = _question("licence under which the model is published")
    comments: str | None = _question("anything else")
    sources: dict[str, SourceAnswers] = Field(default_factory=dict, description="answers about each source")

    def source(self, name: str) -> SourceAnswers:
        return self.sources.get(name, SourceAnswers())


def read_answers(path: Path, sources: list[str]) -> PaperAnswers:
    """Raises InputError for a file that cannot be read, an unknown field, and a source that the recipe lacks."""
    try:
        fields = read_yaml(path.read_bytes(), str(path)).value
    except OSError as error:
        raise InputError(f"{path}: {error}; name a file of answers, or leave --answers out") from error
    answers = validate_config(PaperAnswers, fields or {})
    for name in answers.sources:
        if name not in sources:
            raise InputError(f"{path}: sources.{name}: no source of the recipe; they are {', '.join(sources)}")
    return answers


def open_questions(answers: PaperAnswers, sources: list[str]) -> Iterator[tuple[str, str]]:
    """(field, question) of each answer that is missing."""
    for name, field in PaperAnswers.model_fields.items():
        if name != "sources" and getattr(answers, name) is None:
            yield name, field.description or ""
    for source in sources:
        given = answers.source(source)
        for name, field in SourceAnswers.model_fields.items():
            is_asked = name not in OF_CATEGORY or given.category == OF_CATEGORY[name]
            if is_asked and getattr(given, name) is None:
                yield f"sources.{source}.{name}", field.description or ""


def answers_form(sources: list[str]) -> str:
    """A file of answers without any, the question of each field beside it."""
    lines = ["# Answer what you can; null leaves a question open, and the papers say so."]
    lines += [
        f"{name}: null  # {field.description}" for name, field in PaperAnswers.model_fields.items() if name != "sources"
    ]
    lines.append("sources:")
    for source in sources:
        lines.append(f"  {source}:")
        lines += [f"    {name}: null  # {field.description}" for name, field in SourceAnswers.model_fields.items()]
    return "\n".join(lines) + "\n"


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


@dataclass(frozen=True)
class Content:
    """stages: manifests of the complete stages, in order. created: time of the first writing, ISO 8601 in UTC."""

    recipe: Recipe
    stages: Mapping[str, Manifest]
    facts: Facts
    answers: PaperAnswers
    created: str
    reservations: tuple[Reservation, ...] = ()

    @property
    def sources(self) -> list[str]:
        return [source.name for source in self.recipe.sources]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the stages, facts and answers: identifies the papers."""
        return fingerprint(
            {
                "stages": {name: manifest.fingerprint for name, manifest in self.stages.items()},
                "facts": {name: fact.digest for name, fact in self.facts.items()},
                "answers": self.answers.model_dump(mode="json"),
                "reservations": [item.model_dump(mode="json") for item in self.reservations],
            }
        )

    def rows(self, name: str, **equal: Any) -> list[dict[str, Any]]:
        """The rows of a fact with these values; none where the fact could not be computed."""
        rows = self.facts[name].rows if name in self.facts else ()
        return [row for row in rows if all(row[key] == value for key, value in equal.items())]

    def total(self, name: str, column: str, **equal: Any) -> int:
        return sum(row[column] or 0 for row in self.rows(name, **equal))

    def origin_of(self, name: str) -> str:
        """The query and digest behind a fact's numbers, as Markdown."""
        return f"[{name}](#{name.replace('_', '-')}) `{self.facts[name].digest}`" if name in self.facts else ""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
        """Lines of a table of the fact's rows, with its query and digest below."""
        if name not in self.facts:
            return ["Not recorded: no such column in the corpus.", ""]
        table_rows = self.facts[name].rows if rows is None else rows
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell(row[column]) for column in columns)} |" for row in table_rows]
        return [*lines, "", f"Query {self.origin_of(name)}.", ""]

    def answer(self, field: str, source: str | None = None) -> str:
        """The answer, or that the question is open."""
        given = getattr(self.answers if source is None else self.answers.source(source), field)
        if given is None:
            place = field if source is None else f"sources.{source}.{field}"
            return f"**open: `{place}` in {ANSWERS_NAME}**"
        return (
            {True: "yes", False: "no"}.get(given, plain(str(given))) if isinstance(given, bool) else plain(str(given))
        )

    def queries_section(self) -> list[str]:
        """The section that says how every number is computed again."""
        lines = [
            "## How the numbers are computed again",
            "",
            "`gristmill summary WORKDIR --check` computes them all and compares; each query also runs in DuckDB in the "
            "work folder. Inputs are fingerprints of the paths and SHA-256 of the files read.",
            "",
        ]
        for name, fact in self.facts.items():
            inputs = ", ".join(f"`{pattern}` {digest}" for pattern, digest in sorted(fact.inputs.items()))
            lines += [f"### {name.replace('_', '-')}", "", f"{fact.about[0].upper()}{fact.about[1:]}.", ""]
            lines += ["```sql", fact.query, "```", "", f"Rows `{fact.digest}`; inputs: {inputs}.", ""]
        return lines

    def chain_section(self) -> list[str]:
        """The fingerprints from raw files to the last stage."""
        lines = ["## Chain of fingerprints", "", "| stage | fingerprint | made from |", "|---|---|---|"]
        for name, manifest in self.stages.items():
            inputs = ", ".join(f"{key} `{value}`" for key, value in sorted(manifest.inputs.items()))
            lines.append(f"| {name} | `{manifest.fingerprint}` | {inputs} |")
        return [*lines, ""]


def plain(text: str) -> str:
    """Text in which Markdown and HTML mean nothing, on one line."""
    return " ".join(text.split()).translate(MARKDOWN_SIGNS)


def cell(value: Any) -> str:
    """A value as a cell of a table."""
    if value is None:
        return "unknown"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else plain(str(value)) or "not given"
