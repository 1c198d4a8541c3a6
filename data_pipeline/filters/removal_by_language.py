"""Warnings for rules that removed more than half of a source or of one of its languages, each with a fix."""

from collections.abc import Iterator, Mapping
from typing import Any

MIN_DOCUMENTS = 10  # with fewer, the share says little
HALF = 0.5


def heavy_removals(sources: Mapping[str, Any]) -> list[str]:
    """One line for every rule that removed over half of a source or of one of its languages. sources: of
    counts.json."""
    return [_line(*found) for source, entry in sources.items() for found in _heavy(source, entry)]


def _heavy(source: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield (source, language or "", rule, documents removed, documents read)."""
    languages: Mapping[str, Any] = entry["languages"]
    read = sum(each["documents"] for each in languages.values())
    rules = sorted({rule for each in languages.values() for rule in each["removed"]})
    for rule in rules:
        taken = {language: each["removed"].get(rule, 0) for language, each in languages.items()}
        if read >= MIN_DOCUMENTS and sum(taken.values()) > HALF * read:
            yield source, "", rule, sum(taken.values()), read
        for language, count in taken.items():
            documents = languages[language]["documents"]
            if documents >= MIN_DOCUMENTS and count > HALF * documents and len(languages) > 1:
                yield source, language, rule, count, documents


def _line(source: str, language: str, rule: str, taken: int, read: int) -> str:
    preset, _, name = rule.partition(".")
    where = f"source {source}" + (f", language {language}" if language else "")
    return (
        f"MORE THAN HALF REMOVED BY ONE RULE: {rule} took {taken:,} of {read:,} documents of {where}. If they are good "
        f"text, {_remedy(preset, name, language)}"
    )


def _remedy(preset: str, name: str, language: str) -> str:
    if preset == "language":
        return "lower curate.language_id.threshold, add their language to curate.languages, or name a larger model"
    if preset == "text":
        return "look at quarantine.jsonl and at the source's text_field: these documents hold no text"
    fit = f"give {language or 'their language'} a profile (`gristmill profiles fit`, curate.profiles), "
    return (
        f"{fit}set {{{preset}: {{{name}: null}}}} in curate.filters or the source's filters, or another number: "
        f"`gristmill decide RECIPE --sweep {preset}.{name}=LOW:HIGH:N --by-language` shows what each would keep"
    )
