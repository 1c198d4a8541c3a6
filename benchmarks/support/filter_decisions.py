"""Applies a recipe's filters to texts without a corpus: kept or first failed rule, and the profile used."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.curate_config import CurateConfig, optional_signals, unmeasured_signals, used_profiles
from gristmill.data_pipeline.filters.apply import failures
from gristmill.data_pipeline.filters.profiles import Rules, load_profiles, rules_of
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure
from gristmill.data_pipeline.signals.language import detect


@dataclass(frozen=True)
class FilterDecisions:
    """Decisions on N texts. failed: bool[rules, N]; profiles: the key of each, "" without profiles."""

    rules: Rules
    failed: np.ndarray
    profiles: list[str]

    @property
    def kept(self) -> np.ndarray:
        return ~self.failed.any(axis=0)

    def first_failed_rules(self) -> list[str]:
        """First failed rule of each text; "" if it is kept."""
        at = self.failed.argmax(axis=0)
        return ["" if kept else self.rules.rules[k].label for k, kept in zip(at, self.kept, strict=True)]


def decide(texts: Sequence[str], config: CurateConfig) -> FilterDecisions:
    """Applies the filters as curation does, without normalization and text edits."""
    detected, measured = detect(texts, config.language_id), measure(texts, config.word_tokenizer)
    optional = optional_signals(config, config.filters)
    columns = optional.columns(TextBuffer.of(texts), detected, *[pa.nulls(len(texts), pa.string())] * 2)
    names = [*detected.schema.names, *measured.schema.names, *(field.name for field in optional.fields())]
    table = pa.table([*detected.columns, *measured.columns, *columns], names=names)
    profiles = None if (wanted := used_profiles(config)) is None else load_profiles(wanted)
    rules = rules_of(config.filters, config.languages, config.language_id, unmeasured_signals(config), (), profiles)
    held = table.column("profile").to_pylist() if profiles is not None else [""] * len(texts)
    return FilterDecisions(rules, failures(table, rules), held)
