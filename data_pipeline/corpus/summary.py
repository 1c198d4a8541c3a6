"""counts.json: the counts and the rules of every source, and the check that every source keeps training documents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.corpus.counts import check_not_empty
from gristmill.data_pipeline.corpus.writer import quarantined_rows, write_quarantine
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic

COUNTS_NAME = "counts.json"


def write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    write_atomic(folder / COUNTS_NAME, canonical_json(summary) + b"\n")


def check_training_documents(sources: Sequence[SourceState], summary: Mapping[str, Any], folder: Path) -> None:
    """Raises InputError if a source has no training documents left.

    The caller writes the ledger. Counts and quarantine are written here, so that `gristmill why` can explain each
    document."""
    for one in sources:
        reason = next((row["reason"] for row in quarantined_rows(one, ["unreadable", "reason"])), "")
        try:
            check_not_empty(one.source, summary["sources"][one.source.name], reason)
        except InputError as error:
            write_quarantine(sources, folder)
            write_summary(summary, folder)
            raise InputError(
                f"{error}. The ledger in {folder / 'ledger'} records why each document was removed; show one document "
                f"with `gristmill why DOC_ID --corpus {folder}`"
            ) from error


def rule_table(sources: Sequence[SourceState]) -> dict[str, Any]:
    """By source: each rule with its signal, comparison, threshold and where the number is from."""
    return {
        one.source.name: [
            {
                "rule": rule.label,
                "signal": rule.signal,
                "keep": rule.keep,
                "threshold": float(rule.threshold),
                "source": rule.source,
                "profiles": _profile_thresholds(one, index),
            }
            for index, rule in enumerate(one.rules.rules)
        ]
        for one in sources
    }


def _profile_thresholds(one: SourceState, rule_index: int) -> dict[str, float | None]:
    """The rule's threshold in each language profile that the source's documents have; null where the rule is off."""
    present: set[str] = set()
    for results in one.filter_results:
        present.update(results.present_languages)
    profiles = sorted(present & one.rules.by_profile.keys())
    thresholds = {key: one.rules.by_profile[key][rule_index] for key in profiles}
    return {key: None if np.isnan(number) else float(number) for key, number in thresholds.items()}


def document_totals(summary: Mapping[str, Any]) -> dict[str, int]:
    """Documents read, kept, removed and quarantined, summed over all sources."""
    found = Counter[str]()
    for entry in summary["sources"].values():
        found["read"] += entry["read"]["documents"]
        for outcome in ("kept", "removed", "quarantined"):
            found[outcome] += sum(counts["documents"] for counts in entry[outcome].values())
    return dict(found)
