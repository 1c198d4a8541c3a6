"""Shares of the training tokens by language: temperature, floors, caps on epochs.

With index.languages every language of a source is indexed as a source of its own, SOURCE.LANGUAGE; the name of a source
in a recipe has no dot."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.config import LanguageSampling
from gristmill.data_pipeline.indexed.dataset import Dataset
from gristmill.data_pipeline.indexed.draws import blend_weights
from gristmill.foundation.errors import RecipeError

OTHER = "other"  # languages of a source that are too small to be sampled by themselves
UNKNOWN = "unknown"
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}([_-][A-Za-z0-9]{2,8}){0,3}")  # en, pt_BR, zh-Hant-TW, eng_Latn

ROUNDING = 1e-12  # of sums of shares

Cell = tuple[str, str]  # (source, language)


def cell_name(source: str, language: str) -> str:
    return f"{source}.{language}"


def language_of(name: str) -> str | None:
    """ "wiki.pt_BR" -> "pt_BR", "wiki" and the cell "wiki.q07" of index.mix -> None."""
    tag = name.partition(".")[2]
    return tag if LANGUAGE_TAG.fullmatch(tag) or tag in (OTHER, UNKNOWN) else None


def language_tag(language: str | None) -> str:
    """The language as part of a file name; what is no tag of a language becomes `unknown`."""
    return language if language and LANGUAGE_TAG.fullmatch(language) else UNKNOWN


def pooled(tokens: Mapping[str, int], min_tokens: int) -> dict[str, str]:
    """Language -> the name it is sampled under. ({"de": 90, "fr": 5}, 10) -> {"de": "de", "fr": "other"}."""
    return {language: language if count >= min_tokens else OTHER for language, count in tokens.items()}


@dataclass(frozen=True)
class RunLength:
    """Lengths that caps on epochs depend on. train_tokens: None where the recipe trains nothing."""

    train_tokens: int | None
    sequence_length: int = 1

    def usable(self, tokens: int) -> int:
        """Tokens of an epoch: those of whole samples."""
        return max(0, tokens - 1) // self.sequence_length * self.sequence_length


NO_RUN = RunLength(train_tokens=None)


def cell_weights(
    tokens: Mapping[Cell, int], sources: Mapping[str, float], config: LanguageSampling, run: RunLength
) -> dict[Cell, float]:
    """Share of the training tokens of each cell; inside a language its sources keep their proportions.

    tokens: of the train split. sources: weights, of any sum. Raises RecipeError on floors or caps that cannot hold."""
    in_source = {name: sum(count for (source, _), count in tokens.items() if source == name) for name in sources}
    whole = sum(sources.values())
    mass = {cell: sources[cell[0]] / whole * count / in_source[cell[0]] for cell, count in tokens.items() if count}
    languages: dict[str, float] = {}
    available: dict[str, int] = {}
    for cell, share in mass.items():
        languages[cell[1]] = languages.get(cell[1], 0.0) + share
        available[cell[1]] = available.get(cell[1], 0) + run.usable(tokens[cell])
    shares = _raised(tempered(languages, config.alpha), config.min_share)
    if config.max_epochs is not None:
        if run.train_tokens is None:
            raise RecipeError("index.languages.max_epochs needs train.tokens, and the recipe has no section `train`")
        shares = _capped(shares, available, config.max_epochs, run.train_tokens)
    return {cell: shares[cell[1]] * mass[cell] / languages[cell[1]] if mass.get(cell) else 0.0 for cell in tokens}


def weights_by_language(
    tokens: Mapping[str, int], sources: Mapping[str, float], config: LanguageSampling, run: RunLength
) -> dict[str, float]:
    """cell_weights by the names of the indexed files, SOURCE.LANGUAGE."""
    cells: dict[Cell, int] = {}
    for name, count in tokens.items():
        source, _, language = name.partition(".")
        cells[source, language] = count
    return {cell_name(*cell): share for cell, share in cell_weights(cells, sources, config, run).items()}


def resolved_weights(
    dataset: Dataset, sources: Mapping[str, float | None], languages: LanguageSampling | None, run: RunLength
) -> dict[str, float]:
    """Weight of each indexed file in a blend of the sources; 0 of what has no training tokens.

    sources: weights, all None in proportion to the training tokens. {"web": 3, "books": 1} of web.de, web.en and
    books.en with 100 tokens each -> {"web.de": 0.375, "web.en": 0.375, "books.en": 0.25} by language, alpha 1."""
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources}
    of_sources = dict.fromkeys(sources, 0)
    for name, count in tokens.items():
        of_sources[name.partition(".")[0]] += count
    present = {name: weight if weight is None or of_sources[name] else 0.0 for name, weight in sources.items()}
    blend = blend_weights(present, of_sources)
    return blend if languages is None else weights_by_language(tokens, blend, languages, run)


def tempered(shares: Mapping[str, float], alpha: float) -> dict[str, float]:
    """({"en": 0.9, "de": 0.1}, 0.5) -> {"en": 0.75, "de": 0.25}."""
    whole = sum(shares.values())
    powers = {name: (share / whole) ** alpha for name, share in shares.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def _raised(shares: Mapping[str, float], floor: float) -> dict[str, float]:
    """Shares below the floor are raised to it; the others keep their proportions."""
    if floor * len(shares) > 1:
        raise RecipeError(
            f"index.languages.min_share={floor:g} of each of {len(shares)} languages is more than 1; "
            f"set it to {1 / len(shares):.4f} or less"
        )
    return _bounded(shares, {name: floor for name in shares}, lambda share, bound: share < bound)


def _capped(
    shares: Mapping[str, float], tokens: Mapping[str, int], max_epochs: float, train_tokens: int
) -> dict[str, float]:
    """Shares above their cap are lowered to it; the others keep their proportions."""
    whole = max_epochs * sum(tokens.values())
    if whole < train_tokens:
        raise RecipeError(
            f"index.languages.max_epochs: all languages together give at most {whole / train_tokens:.1%} of "
            "train.tokens; raise it, train on fewer tokens, or add text"
        )
    caps = {name: max_epochs * count / train_tokens for name, count in tokens.items()}
    return _bounded(shares, caps, lambda share, bound: share > bound * (1 + ROUNDING))


def _bounded(
    shares: Mapping[str, float], bounds: Mapping[str, float], violates: Callable[[float, float], bool]
) -> dict[str, float]:
    """Sets violating shares to their bound and scales the others to a sum of 1, until none violates."""
    fixed: dict[str, float] = {}
    while True:
        free = {name: share for name, share in shares.items() if name not in fixed}
        scale = (1 - sum(fixed.values())) / sum(free.values()) if free else 0.0
        scaled = {name: share * scale for name, share in free.items()}
        broken = [name for name, share in scaled.items() if violates(share, bounds[name])]
        if not broken:
            return {name: fixed.get(name, scaled.get(name, 0.0)) for name in shares}
        fixed |= {name: bounds[name] for name in broken}


def tokens_by_language(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Split -> language -> tokens of all sources; no language where the recipe does not sample by language."""
    tokens: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
    for source in dataset.sources:
        language = language_of(source.name)
        if language is None:
            continue
        for split in SPLITS:
            tokens[split][language] = tokens[split].get(language, 0) + source.splits[split].tokens
    return tokens


def held_out_notes(tokens: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Lines on languages that are in training text or in held-out text alone. tokens: split -> language -> count."""
    notes = []
    trained = {language for language, count in tokens["train"].items() if count}
    for split in ("validation", "test"):
        measured = {language for language, count in tokens[split].items() if count}
        if not measured:
            continue
        if unseen := sorted(trained - measured):
            notes.append(f"languages without {split} text, so no score of theirs: {_listed(unseen)}")
        if extra := sorted(measured - trained):
            notes.append(f"languages in {split} text alone, not trained on: {_listed(extra)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})"
