"""The curation steps in order, and the documents of each source that each step removed."""

from collections.abc import Mapping
from typing import Any

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.pipelines.report.flow import Flow

# The steps after the filters.
STEPS_AFTER_FILTERS = (
    "quality",
    "exact_dedup",
    "near_dedup",
    "paragraph_dedup",
    "line_dedup",
    "substring_dedup",
    "decontaminate",
)


def flow_of(counts: Mapping[str, Any]) -> Flow:
    """Quarantine first, then the filters in the recipe's order, then the steps after them."""
    sources = counts["sources"]
    removed: dict[str, dict[str, int]] = {}
    for source, entry in sources.items():
        for label, gone in entry["removed"].items():
            step = removed.setdefault(label.partition(".")[0], {})
            step[source] = step.get(source, 0) + gone["documents"]
    order = dict.fromkeys(rule.partition(".")[0] for rule in rule_order(counts))
    ends = {
        split: {source: entry["kept"].get(split, {"documents": 0})["documents"] for source, entry in sources.items()}
        for split in SPLITS
    }
    quarantined = {
        source: sum(each["documents"] for each in entry["quarantined"].values()) for source, entry in sources.items()
    }
    steps = {"quarantine": quarantined} if any(quarantined.values()) else {}
    steps |= {step: removed[step] for step in order if step in removed}
    # a split document counts once per piece, from the start of the diagram
    read = {source: sum(each.get(source, 0) for each in (*steps.values(), *ends.values())) for source in sources}
    return Flow(tuple(sources), read, steps, ends)


def rule_order(counts: Mapping[str, Any]) -> list[str]:
    """All configured rules and steps, in the recipe's order."""
    configured = [rule["rule"] for rules in counts["rules"].values() for rule in rules]
    removing = {label for entry in counts["sources"].values() for label in entry["removed"]}
    return list(dict.fromkeys([*configured, *STEPS_AFTER_FILTERS, *sorted(removing)]))
