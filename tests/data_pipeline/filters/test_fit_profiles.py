"""Profiles fitted on reference text: quantiles by hand, stop words by frequency, and the command."""

import random

import numpy as np
import pytest
from corpora import write_jsonl

from gristmill.data_pipeline.filters.fit_profiles import fit_profiles, matched, stop_words, windows
from gristmill.data_pipeline.filters.profiles import read_folder


def test_a_threshold_is_matched_within_and_beyond_the_reference():
    english, other = np.arange(1.0, 11.0), np.arange(10.0, 110.0, 10.0)
    assert matched(5.5, english, other) == 55  # half of both lie below
    assert matched(20, english, other) == 200 and matched(0.5, english, other) == 5
    assert matched(3, english, np.array([np.nan])) is None
    assert matched(0.1, np.zeros(4), np.zeros(4)) == 0.1


def test_stop_words_are_the_frequent_short_ones():
    text = "der Fluss und der Bach und das Wasserrad, Wasserrad Wasserrad Wasserrad 7 7 7 7 7"
    assert stop_words([text])[:3] == ("der", "und", "bach")
    assert stop_words([""]) == ()


def test_windows_are_pages_of_whole_lines():
    text = "\n".join(f"line {number} of the text" for number in range(95))  # 5 words each
    pieces = windows(text)
    assert "\n".join(pieces) == text and [piece.count("\n") + 1 for piece in pieces] == [40, 55]


def speech(short: list[str], long: list[str], seed: int) -> str:
    rng = random.Random(seed)
    lines = [" ".join(rng.choice(short if k % 2 else long) for k in range(12)).capitalize() + "." for _ in range(90)]
    return "\n".join(lines)


ENGLISH = speech(["the", "of", "and", "to", "in"], ["river", "mills", "wheel", "grain", "stone", "water"], 1)
LONGER = speech(["aal", "eeo", "uun"], ["flussmühlenrad", "getreidespeicher", "wassermühlstein"], 2)


def test_a_language_of_longer_words_may_have_longer_words():
    profiles = {p.key: p for p in fit_profiles({("en", "Latn"): [ENGLISH], ("xx", "Latn"): [LONGER]}, "by hand")}
    assert list(profiles) == ["en_Latn", "xx_Latn", "und_Latn", "und_Zyyy"]
    assert not profiles["en_Latn"].thresholds and set(profiles["xx_Latn"].stop_words) == {"aal", "eeo", "uun"}
    quality = profiles["xx_Latn"].thresholds["gopher_quality"]
    assert quality["max_mean_word_length"] > 15 and quality["min_stop_words"] is None
    # shares are never stricter than the published ones
    assert profiles["xx_Latn"].thresholds["gopher_repetition"]["dup_line_ratio"] >= 0.3
    assert profiles["und_Latn"].thresholds["gopher_quality"]["min_language_stop_words"] is None


def test_the_command_writes_profiles_that_are_read_back(call, tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": ENGLISH, "lang": "eng"}, {"text": LONGER, "lang": "deu"}])
    arguments = ["profiles", "fit", "--corpus", corpus, "--output", tmp_path / "out", "--language-field", "lang"]
    assert call(*arguments, "--source", "by hand")[0] == 0
    profiles = read_folder(tmp_path / "out")
    assert set(profiles) == {"en_Latn", "de_Latn", "und_Latn", "und_Zyyy"}
    assert profiles["de_Latn"].source == "by hand" and "aal" in profiles["de_Latn"].stop_words
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert call(*arguments, "--source", "by hand")[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


@pytest.mark.parametrize(
    ("record", "words", "code"),
    [
        ({"text": "a", "lang": "deu"}, "no English text among 1 records", 2),
        ({"body": "a", "lang": "en"}, "no text in field 'text'; fields are body, lang", 1),
        (b"{", "line 1 is not JSON", 1),
    ],
)
def test_a_corpus_that_cannot_be_fitted_is_refused(call, tmp_path, record, words, code):
    corpus = write_jsonl(tmp_path / "c.jsonl", [record])
    given = ["profiles", "fit", "--corpus", corpus, "--output", tmp_path / "out", "--language-field", "lang"]
    found, said = call(*given)
    assert found == code and words in said
