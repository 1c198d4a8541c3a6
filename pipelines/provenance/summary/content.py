"""Content of the papers: facts, answers and the chain of fingerprints, and how Markdown shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.foundation.config import Config
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.manifest import Manifest
from gristmill.pipelines.provenance.summary.answers import ANSWERS_NAME, PaperAnswers
from gristmill.pipelines.provenance.summary.facts import Facts
from gristmill.pipelines.recipes.config import Recipe

MARKDOWN_SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "\\|<>*_`[]"})


class Reservation(Config):
    """A file of robots.txt records or opt-outs that the recipe applies, and the days of its records."""

    list: str
    sha256: str
    first: str
    last: str


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
