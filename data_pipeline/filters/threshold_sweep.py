"""Threshold sweep: counts what other thresholds would keep, on annotated files, without writing a corpus; and warnings
for rules that removed much."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.apply import SOURCE, FilterTask, failures, signal_values
from gristmill.data_pipeline.filters.profiles import PROFILE
from gristmill.foundation.errors import RecipeError, did_you_mean
from gristmill.foundation.runtime.tasks.engine import Engine

MAX_THRESHOLDS = 1000
_SWEEP = re.compile(r"(?P<rule>[\w.]+)=(?P<low>[^:]+):(?P<high>[^:]+):(?P<count>\d+)")


@dataclass(frozen=True)
class Sweep:
    """rule=low:high:n, n equally spaced thresholds from low to high."""

    rule: str
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class SweepRow:
    """Documents that the filters would keep of a source with the rule at this threshold, before deduplication.

    taken: documents that fail only this rule."""

    source: str
    language: str  # "" for all languages
    threshold: float
    documents: int
    bytes: int
    taken: int


def parse_sweep(text: str) -> Sweep:
    """`gopher_quality.min_words=20:100:5` -> 20, 40, 60, 80, 100. Raises RecipeError on any other form."""
    match = _SWEEP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        low, high, count = float(match["low"]), float(match["high"]), int(match["count"][:9])
        if not (np.isfinite(low) and np.isfinite(high)) or count < 1:
            raise ValueError
    except ValueError:
        raise RecipeError(
            f"{text!r} is not a sweep; write rule=low:high:n, as gopher_quality.min_words=20:100:5"
        ) from None
    if count > MAX_THRESHOLDS:
        raise RecipeError(f"{text!r} asks for {match['count']} thresholds; the maximum is {MAX_THRESHOLDS:,}")
    return Sweep(match["rule"], tuple(float(step) for step in np.linspace(low, high, count)))


def sweep(
    sources: Sequence[tuple[str, Sequence[FilterTask]]], wanted: Sweep, engine: Engine, by_language: bool = False
) -> list[SweepRow]:
    """One row for every source that has the rule (with by_language, each of its languages) and every threshold.

    Raises RecipeError if no source has it."""
    labels = {rule.label for _, tasks in sources for task in tasks for rule in task.rules.rules}
    if wanted.rule not in labels:
        known = sorted(labels)
        hint = did_you_mean(wanted.rule, known, otherwise=f"the recipe's rules are {', '.join(known)}")
        raise RecipeError(f"no rule {wanted.rule!r}; {hint}")
    rows = []
    for name, tasks in sources:
        chosen = [(task, wanted) for task in tasks if any(rule.label == wanted.rule for rule in task.rules.rules)]
        if not chosen:
            continue
        counted: dict[str, np.ndarray] = {}
        for file_counts in engine.map(_count, chosen, f"sweep {name}", unit="files"):
            for language, counts in file_counts.items():
                group = language if by_language else ""
                counted[group] = counted[group] + counts if group in counted else counts
        rows += [
            SweepRow(name, language, threshold, *(int(n) for n in counts))
            for language in sorted(counted)
            for threshold, counts in zip(wanted.thresholds, counted[language], strict=True)
        ]
    return rows


def _count(task: tuple[FilterTask, Sweep]) -> dict[str, np.ndarray]:
    """By language int64[thresholds, 3]: documents kept, their bytes, documents that fail only this rule."""
    filter_task, wanted = task
    language = PROFILE if filter_task.rules.by_profile else "detected_language"
    columns = ["unreadable", "num_bytes", language, *filter_task.rules.columns]
    only = pc.field(SOURCE) == filter_task.source if filter_task.source else None
    table = pq.read_table(filter_task.path, columns=list(dict.fromkeys(columns)), filters=only)
    readable = pc.is_null(table.column("unreadable")).to_numpy(zero_copy_only=False)
    num_bytes = table.column("num_bytes").to_numpy()
    [place] = [place for place, rule in enumerate(filter_task.rules.rules) if rule.label == wanted.rule]
    rule = filter_task.rules.rules[place]
    passes_others = readable & ~failures(table, filter_task.rules.without(place)).any(axis=0)
    values = signal_values(table, rule.signal, filter_task.rules.languages)
    asked = ~np.isnan(filter_task.rules.only(place).thresholds(table)[0])  # not off in the document's profile
    languages = np.array(table.column(language).to_pylist(), dtype=np.str_)
    counted: dict[str, np.ndarray] = {}
    for name in np.unique(languages).tolist() or [""]:
        language_mask, rows = passes_others & (languages == name), []
        for threshold in wanted.thresholds:
            passes = rule.at(threshold).passes(values) | ~asked
            kept = language_mask & passes
            rows.append([kept.sum(), num_bytes[kept].sum(), (language_mask & ~passes).sum()])
        counted[name] = np.array(rows, dtype=np.int64)
    return counted


# Warnings for rules that removed more than half of a source or of one of its languages, each with a fix.

MIN_DOCUMENTS = 10  # with fewer, the share says little
MAX_CASES = 4  # sources and languages that one line names
HALF = 0.5


def heavy_removals(sources: Mapping[str, Any], wanted: Mapping[str, Sequence[str]] = MappingProxyType({})) -> list[str]:
    """One line for every rule that removed over half of a source or of one of its languages.

    sources: of counts.json. wanted: source -> languages that the recipe names. The rule on languages removes the
    others by intent, so of its victims only these are told apart."""
    cases: dict[str, list[tuple[str, str, int, int]]] = {}
    for source, entry in sources.items():
        for language, rule, taken, read in _heavy(entry, wanted.get(source, ())):
            cases.setdefault(rule, []).append((source, language, taken, read))
    return [_line(rule, rows) for rule, rows in cases.items()]


def _heavy(entry: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (language or "", rule, documents removed, documents read) of one source."""
    languages: Mapping[str, Any] = entry["languages"]
    read = sum(counts["documents"] for counts in languages.values())
    for rule in sorted({rule for counts in languages.values() for rule in counts["removed"]}):
        taken = {language: counts["removed"].get(rule, 0) for language, counts in languages.items()}
        if read >= MIN_DOCUMENTS and sum(taken.values()) > HALF * read:
            yield "", rule, sum(taken.values()), read
        for language, count in taken.items():
            documents = languages[language]["documents"]
            if rule.startswith("language.") and language.partition("_")[0] not in wanted:
                continue
            if documents >= MIN_DOCUMENTS and count > HALF * documents and len(languages) > 1:
                yield language, rule, count, documents


def _line(rule: str, cases: Sequence[tuple[str, str, int, int]]) -> str:
    """cases: (source, language or "", documents removed, documents read), of which the largest are named."""
    largest = sorted(cases, key=lambda case: -case[2])[:MAX_CASES]
    parts = [
        f"{taken:,} of {read:,} documents of {source}" + (f" in {language}" if language else "")
        for source, language, taken, read in largest
    ]
    rest = f" and {len(cases) - len(largest)} more" if len(cases) > len(largest) else ""
    preset, _, name = rule.partition(".")
    return (
        f"MORE THAN HALF REMOVED BY ONE RULE: {rule} took {', '.join(parts)}{rest}. If they are good text, "
        f"{_remedy(preset, name, largest[0][1])}"
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
