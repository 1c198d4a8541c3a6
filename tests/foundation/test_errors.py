"""The suggestion of an error message is the most similar known name, or none."""

from gristmill.foundation.errors import MAX_COMPARED_CHARS, did_you_mean, nearest_name

NAMES = ("min_words", "max_words", "threshold")


def test_the_most_similar_name_is_suggested():
    assert nearest_name("min_word", NAMES) == "min_words"
    assert did_you_mean("treshold", NAMES, "see docs") == "did you mean 'threshold'?"


def test_nothing_is_suggested_below_the_cutoff():
    assert nearest_name("zzz", NAMES) is None
    assert nearest_name("zzz", NAMES, cutoff=0.0) in NAMES
    assert nearest_name("min_words", ()) is None
    assert did_you_mean("zzz", NAMES, "see docs") == "see docs"


def test_only_the_first_characters_of_a_long_name_are_compared():
    long = "a" * MAX_COMPARED_CHARS
    assert nearest_name(long + "b" * 1_000_000, [long]) == long
