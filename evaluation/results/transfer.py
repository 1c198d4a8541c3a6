"""Cross-language transfer: scores of a benchmark in several languages, beside a reference language and chance."""

from collections.abc import Callable, Sequence

from gristmill.evaluation.results.table import ScoreRow

REFERENCES = ("en", "eng_Latn")  # English, in lm-eval's tasks and in FLORES
METRICS = ("acc", "bits_per_byte")

FamilyOf = Callable[[str], tuple[str, str] | None]  # task -> (benchmark, language)


def transfer_table(rows: Sequence[ScoreRow], family_of: FamilyOf) -> list[list[str]]:
    """A row per language, a column per benchmark of two languages or more, after a header; empty without any.

    A cell is the score, and in brackets its difference to English where the benchmark has it. Last come the mean over
    the languages but English, and chance."""
    scores: dict[str, dict[str, ScoreRow]] = {}
    for row in rows:
        found = family_of(row.task)
        if found is not None and row.metric in METRICS and row.score is not None:
            scores.setdefault(found[0], {})[found[1]] = row
    families = {name: of_family for name, of_family in scores.items() if len(of_family) > 1}
    if not families:
        return []
    table = [["language", *families]]
    for language in sorted({language for of_family in families.values() for language in of_family}):
        table.append([language, *(_cell(of_family, language) for of_family in families.values())])
    table.append(["mean without English", *(_mean(of_family) for of_family in families.values())])
    table.append(["chance", *(_chance(of_family) for of_family in families.values())])
    return table


def transfer_markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join([*lines, "", "- in brackets: the difference to English", ""])


def _cell(of_family: dict[str, ScoreRow], language: str) -> str:
    if language not in of_family:
        return ""
    score = of_family[language].score or 0.0
    reference = next((of_family[name].score for name in REFERENCES if name in of_family), None)
    if reference is None or language in REFERENCES:
        return f"{score:.4f}"
    return f"{score:.4f} ({score - reference:+.4f})"


def _mean(of_family: dict[str, ScoreRow]) -> str:
    others = [row.score or 0.0 for language, row in of_family.items() if language not in REFERENCES]
    return f"{sum(others) / len(others):.4f}" if others else ""


def _chance(of_family: dict[str, ScoreRow]) -> str:
    chances = {row.chance for row in of_family.values()}
    (chance,) = chances if len(chances) == 1 else (None,)
    return "" if chance is None else f"{chance:.4f}"
