"""Fitting of language profiles to reference texts: stop words by frequency, thresholds at English quantiles.

A threshold at some quantile of the English reference is set to the same quantile of the language's. Most published
thresholds are beyond all clean text: they are scaled with the text's extreme value (the mean word length of the English
reference reaches 5.2 and its maximum is 10; a language that reaches 10.4 gets 20)."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.filters.presets import PRESETS, PROFILE_RULES, Rule
from gristmill.data_pipeline.filters.profiles import UNKNOWN, Profile
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.kernel import measure_buffer
from gristmill.data_pipeline.signals.language import NO_LETTERS
from gristmill.data_pipeline.signals.reference import split_words
from gristmill.data_pipeline.signals.stop_words import make_table, stop_word_columns, word_order_columns

FITTED = ("gopher_quality", "gopher_repetition", "fineweb_quality")
WINDOW_WORDS = 200  # a reference document is measured in pieces of about a page, as thresholds meet pages
MIN_WORDS = 400  # a language with less text is left out
NUM_STOP_WORDS = 24
MAX_STOP_WORD_LENGTHS = 1.0  # of the language's mean word length: a longer frequent word is the text's subject
WITHOUT_SPACES = frozenset(["Hani", "Jpan", "Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Lana", "Tavt", "Java", "Bali"])
PHRASE_SCRIPTS = frozenset(["Tibt", "Lana", "Tavt"])  # white space ends a phrase: its tokens come in no order of words
SYLLABIC = frozenset(["Hani", "Jpan"])  # one character is a word or a particle; elsewhere it is a letter
# Where a character counts as a word, word length says nothing; where no mark ends a sentence, its length neither.
_OFF_WITHOUT_SPACES = ("min_mean_word_length", "max_mean_word_length")
# What a threshold on these means changes with the length of the language's words. The others are shares, whose tails a
# short reference text does not show: they are loosened where the language needs it, and never made stricter.
_SCALES = frozenset(
    ("num_plain_words", "mean_word_length", "newline_word_ratio", "mean_sentence_words", "language_stop_word_ratio")
)
_COUNTED = ("num_plain_words",)  # of a whole document, not of a window
POOLED = 0.05  # a script's threshold is as strict as one of twenty of its languages has it


@dataclass(frozen=True)
class MeasuredTexts:
    """Reference data of one language. windows, documents: signal -> values. stop_words: the most frequent first."""

    stop_words: tuple[str, ...]
    windows: Mapping[str, np.ndarray]
    documents: Mapping[str, np.ndarray]


def fit_profiles(
    texts: Mapping[tuple[str, str], Sequence[str]], source: str, english: tuple[str, str] = ("en", "Latn")
) -> list[Profile]:
    """Fit a profile for every language of `texts` ((language, script) -> documents) and every script; English has the
    published thresholds. Raises KeyError without English, to which all are matched."""
    reference = _measured(texts[english])
    fitted = []
    for (language, script), documents in sorted(texts.items()):
        if (language, script) == english:
            fitted.append(Profile(language=language, script=script, source=source, stop_words=reference.stop_words))
        elif sum(len(_words(text)) for text in documents) >= MIN_WORDS:
            fitted.append(_fit(language, script, source, _measured(documents), reference))
    return [*fitted, *_fallbacks([p for p in fitted if (p.language, p.script) != english], source)]


def stop_words(texts: Sequence[str]) -> tuple[str, ...]:
    """The most frequent words without long ones, which name the text's topic; ties in alphabetical order."""
    counts = Counter(word for text in texts for word in _words(text.lower()) if not word.isnumeric())
    if not counts:
        return ()
    longest = max(1.0, MAX_STOP_WORD_LENGTHS * sum(len(w) * n for w, n in counts.items()) / counts.total())
    short = [(word, count) for word, count in counts.items() if len(word) <= longest and any(map(str.isalpha, word))]
    return tuple(word for word, _ in sorted(short, key=lambda item: (-item[1], item[0]))[:NUM_STOP_WORDS])


def matched(threshold: float, english: np.ndarray, values: np.ndarray) -> float | None:
    """The threshold among `values` that matches `threshold` among the English values; None without finite values.

    Within the English range at its quantile, beyond it in proportion to the extreme: 10 of English values up to 5 is
    20 of values up to 10."""
    english, values = english[np.isfinite(english)], values[np.isfinite(values)]
    if not len(english) or not len(values):
        return None
    low, high = english.min(), english.max()
    if low < threshold < high:
        return float(np.quantile(values, (english < threshold).mean()))
    edge, own = (high, values.max()) if threshold >= high else (low, values.min())
    return float(own * threshold / edge) if edge > 0 and own > 0 else float(threshold)


def _fit(language: str, script: str, source: str, own: MeasuredTexts, english: MeasuredTexts) -> Profile:
    thresholds: dict[str, dict[str, float | None]] = {}
    for preset in FITTED:
        rules = (*PRESETS[preset], *PROFILE_RULES.get(preset, ()))
        thresholds[preset] = {rule.name: _threshold(rule, script, own, english) for rule in rules}
    words = () if script in WITHOUT_SPACES - SYLLABIC else own.stop_words
    return Profile(language=language, script=script, source=source, stop_words=words, thresholds=thresholds)


def _threshold(rule: Rule, script: str, own: MeasuredTexts, english: MeasuredTexts) -> float | None:
    if rule.name == "min_stop_words":
        return None  # Gopher's eight are English
    if script in WITHOUT_SPACES and rule.name in _OFF_WITHOUT_SPACES:
        return None
    if rule.name in ("min_language_stop_words", "min_stop_word_ratio") and script in WITHOUT_SPACES - SYLLABIC:
        return None
    if rule.name == "max_sentence_words" and script in WITHOUT_SPACES:
        return None
    if rule.signal == "word_order":
        return None if script in PHRASE_SCRIPTS else rule.threshold
    if rule.name in ("min_language_stop_words", "repeated_10gram_ratio", "short_line_ratio"):
        return rule.threshold
    values = "documents" if rule.signal in _COUNTED else "windows"
    threshold = matched(rule.threshold, getattr(english, values)[rule.signal], getattr(own, values)[rule.signal])
    if threshold is None or rule.signal in _SCALES:
        return None if threshold is None else _rounded(threshold)
    return _rounded(max(threshold, rule.threshold) if rule.keep == "<=" else min(threshold, rule.threshold))


def _fallbacks(profiles: Sequence[Profile], source: str) -> list[Profile]:
    """One profile per script, pooled from its languages, and one from all languages."""
    by_script: dict[str, list[Profile]] = defaultdict(list)
    for profile in profiles:
        by_script[profile.script].append(profile)
        by_script[NO_LETTERS].append(profile)
    return [_pooled(script, members, source) for script, members in sorted(by_script.items())]


def _pooled(script: str, profiles: Sequence[Profile], source: str) -> Profile:
    thresholds: dict[str, dict[str, float | None]] = {}
    for preset in FITTED:
        rules = (*PRESETS[preset], *PROFILE_RULES.get(preset, ()))
        thresholds[preset] = {rule.name: _loosest(rule, preset, profiles) for rule in rules}
    return Profile(language=UNKNOWN, script=script, source=source, thresholds=thresholds)


def _loosest(rule: Rule, preset: str, profiles: Sequence[Profile]) -> float | None:
    """The threshold that all but a share POOLED of the languages satisfy; None if most have none, and for stop
    words."""
    if rule.signal in ("num_language_stop_words", "language_stop_word_ratio"):
        return None
    thresholds = [number for profile in profiles if (number := profile.thresholds[preset][rule.name]) is not None]
    if len(thresholds) * 2 <= len(profiles):
        return None
    return _rounded(float(np.quantile(thresholds, POOLED if rule.keep == ">=" else 1 - POOLED)))


def _rounded(value: float) -> float:
    """Round to three digits, the precision of a reference text."""
    return float(f"{value:.3g}")


def _measured(texts: Sequence[str]) -> MeasuredTexts:
    words = stop_words(texts)
    return MeasuredTexts(words, _signals([w for text in texts for w in windows(text)], words), _signals(texts, words))


def _signals(texts: Sequence[str], words: Sequence[str]) -> dict[str, np.ndarray]:
    buffer = TextBuffer.of(texts)
    signals = {
        name: column.to_numpy().astype(np.float64) for name, column in _columns(measure_buffer(buffer, "unicode"))
    }
    table = make_table({"it": tuple(words)}, frozenset(["it"]))
    different, ratio = stop_word_columns(buffer, ["it"] * len(texts), table)
    order, sentences = word_order_columns(buffer, [True] * len(texts))
    optional = {
        "num_language_stop_words": different,
        "language_stop_word_ratio": ratio,
        "word_order": order,
        "mean_sentence_words": sentences,
    }
    return signals | {name: np.array(c.to_pylist(), dtype=np.float64) for name, c in optional.items()}


def _columns(batch) -> list:
    return list(zip(batch.schema.names, batch.columns, strict=True))


def windows(text: str) -> list[str]:
    """Group the lines of a text into windows of at least WINDOW_WORDS words; the remainder joins the last window."""
    pieces: list[list[str]] = [[]]
    num_words = 0
    for line in text.split("\n"):
        if num_words >= WINDOW_WORDS:
            pieces.append([])
            num_words = 0
        pieces[-1].append(line)
        num_words += len(_words(line))
    if len(pieces) > 1 and num_words < WINDOW_WORDS:
        last = pieces.pop()
        pieces[-1] += last
    return ["\n".join(piece) for piece in pieces]


def _words(text: str) -> list[str]:
    flags = character_table()
    return [word for word in split_words(text, "unicode") if flags[ord(word[0])] & (WORD | IDEOGRAPH)]
