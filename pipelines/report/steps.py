"""The steps of curation in their order, and how many documents of each source every one of them took."""

from collections.abc import Mapping
from typing import Any

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.pipelines.report.flow import Flow

# What comes behind the filters.
LATER_STEPS = (
    "quality",
    "exact_dedup",
    "near_dedup",
    "paragraph_dedup",
    "line_dedup",
    "substring_dedup",
    "decontaminate",
)


def flow_of(counts: Mapping[str, Any]) -> Flow:
    """Quarantine first, then the filters in the order they were asked, then what came after them."""
    sources = counts["sources"]
    taken: dict[str, dict[str, int]] = {}
    for source, entry in sources.items():
        for label, gone in entry["removed"].items():
            step = taken.setdefault(label.partition(".")[0], {})
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
    steps |= {step: taken[step] for step in order if step in taken}
    # a document that was split counts once for each piece: the picture shows the pieces from the start
    read = {source: sum(each.get(source, 0) for each in (*steps.values(), *ends.values())) for source in sources}
    return Flow(tuple(sources), read, steps, ends)


def rule_order(counts: Mapping[str, Any]) -> list[str]:
    """Every rule and step that took something or could have, as they were asked."""
    asked = [rule["rule"] for rules in counts["rules"].values() for rule in rules]
    taking = {label for entry in counts["sources"].values() for label in entry["removed"]}
    return list(dict.fromkeys([*asked, *LATER_STEPS, *sorted(taking)]))
