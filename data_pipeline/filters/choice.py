"""Config of one filter in a recipe: a preset and the thresholds that the recipe overrides."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from gristmill.data_pipeline.filters.presets import LINE_OPTIONS, PRESETS, PROFILE_RULES
from gristmill.data_pipeline.filters.rule import Rule
from gristmill.foundation.config import Config
from gristmill.foundation.nearest_name import did_you_mean


class FilterChoice(Config):
    """In a recipe: `gopher_quality`, or `{gopher_quality: {min_words: 20, min_stop_words: null}}`; null disables the
    rule."""

    preset: str
    thresholds: dict[str, float | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def is_known(self) -> Self:
        if self.preset not in PRESETS:
            raise ValueError(f"no filter {self.preset!r}; {_hint(self.preset, PRESETS)}")
        known = [*PRESETS[self.preset], *PROFILE_RULES.get(self.preset, ())]
        names = [rule.name for rule in known] + list(LINE_OPTIONS.get(self.preset, ()))
        for name in self.thresholds:
            if name not in names:
                raise ValueError(f"filter {self.preset} has no threshold {name!r}; {_hint(name, names)}")
        return self

    def rules(self) -> tuple[Rule, ...]:
        """The preset's rules in their published order, with the recipe's thresholds."""
        chosen = []
        for rule in PRESETS[self.preset]:
            threshold = self.thresholds.get(rule.name, rule.threshold)
            if threshold is not None:
                chosen.append(rule.at(threshold))
        return tuple(chosen)

    def profile_rules(self) -> tuple[Rule, ...]:
        """The rules that only a language profile or the recipe enables.

        The recipe's min_stop_words applies to the stop words of every language."""
        overrides = dict(self.thresholds)
        if "min_stop_words" in overrides:
            overrides.setdefault("min_language_stop_words", overrides["min_stop_words"])
        rules = PROFILE_RULES.get(self.preset, ())
        wanted = [(rule, overrides.get(rule.name, rule.threshold)) for rule in rules]
        return tuple(rule.at(threshold) for rule, threshold in wanted if threshold is not None)

    def is_fixed(self, rule: Rule) -> bool:
        """Whether the recipe sets the rule's threshold, which then applies to every language."""
        twin = rule.name == "min_language_stop_words" and "min_stop_words" in self.thresholds
        return rule.name in self.thresholds or twin

    def line_options(self) -> dict[str, float | None] | None:
        """Options of the filter's line edits; None if it edits nothing."""
        if self.preset not in LINE_OPTIONS:
            return None
        return {name: self.thresholds.get(name, value) for name, value in LINE_OPTIONS[self.preset].items()}


def parse_choices(value: object) -> object:
    """Expand the recipe's short forms to FilterChoice fields; other values are passed to pydantic's validation."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_parse(item) for item in value)


def _parse(item: object) -> Any:
    if isinstance(item, str):
        return {"preset": item}
    if isinstance(item, dict) and len(item) == 1 and "preset" not in item:
        [(preset, thresholds)] = item.items()
        return {"preset": preset, "thresholds": thresholds or {}}
    return item


def _hint(word: str, known: Iterable[str]) -> str:
    return did_you_mean(word, known, otherwise=f"known names are {', '.join(sorted(known))}")


def check_choices(choices: Sequence[FilterChoice]) -> None:
    """Raises ValueError if a filter is named twice: its columns and rules would have duplicate names."""
    names = [choice.preset for choice in choices]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"filter {doubled[0]!r} is named twice; merge its thresholds into one entry")
