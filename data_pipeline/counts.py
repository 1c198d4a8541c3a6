"""Counts that add up: what was read is what was kept, removed by each rule, and quarantined."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.data_pipeline.errors import InputError


class Tally:
    """Documents and bytes under names that come up as they come."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, int]] = {}

    def add(self, name: str, documents: int, num_bytes: int) -> None:
        entry = self.held.setdefault(name, {"documents": 0, "bytes": 0})
        entry["documents"] += int(documents)
        entry["bytes"] += int(num_bytes)

    def add_rows(self, name: str, chosen_N: np.ndarray, bytes_N: np.ndarray) -> None:
        if chosen_N.any():
            self.add(name, chosen_N.sum(), bytes_N[chosen_N].sum())

    def total(self) -> dict[str, int]:
        return {
            "documents": sum(entry["documents"] for entry in self.held.values()),
            "bytes": sum(entry["bytes"] for entry in self.held.values()),
        }


def source_counts(read: Mapping[str, int], kept: Tally, removed: Tally, quarantined: Tally) -> dict[str, Any]:
    """The source's entry in counts.json. Raises RuntimeError if it does not add up: that would be a fault of ours."""
    parts = [kept.total(), removed.total(), quarantined.total()]
    for unit in ("documents", "bytes"):
        if read[unit] != sum(part[unit] for part in parts):
            raise RuntimeError(f"{unit} do not add up: read {read[unit]}, kept, removed, quarantined {parts}")
    return {"read": dict(read), "kept": kept.held, "removed": removed.held, "quarantined": quarantined.held}


def check_not_empty(source: str, counts: Mapping[str, Any], unreadable: str = "") -> None:
    """Raises InputError if no training document of the source is left, naming what took them.

    unreadable: why the first record in quarantine could not be read."""
    if counts["kept"].get("train", {}).get("documents"):
        return
    read = counts["read"]["documents"]
    if not read:
        raise InputError(f"source {source}: its files hold no documents; check its paths and format")
    quarantined = sum(entry["documents"] for entry in counts["quarantined"].values())
    if quarantined == read:
        raise InputError(f"source {source}: none of its {read} documents can be read; the first: {unreadable}")
    taken = {**counts["removed"], **{f"quarantine ({k})": v for k, v in counts["quarantined"].items()}}
    if not taken:
        raise InputError(f"source {source}: all {read} documents fell into held-out splits; lower curate.splits")
    name, most = max(taken.items(), key=lambda item: item[1]["documents"])
    held = sum(entry["documents"] for entry in counts["kept"].values())
    raise InputError(
        f"source {source}: of {read} documents none is left to train on ({held} are held out); {name} took "
        f"{most['documents']} of them; loosen that rule in curate.filters or the source's filters"
    )
