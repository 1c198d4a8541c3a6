import ftfy
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.annotate.normalize import _ENCODING_ONLY, NormalizeConfig, normalize


def fixed(text: str, **settings) -> tuple[str, tuple[str, ...]]:
    done = normalize(text, NormalizeConfig(**settings))
    return done.text, done.changes


def test_mojibake_is_undone_and_what_authors_meant_is_left():
    assert fixed("IÃ¢â‚¬â„¢m here") == ("I’m here", ("ftfy",))
    assert fixed("“quoted” &amp; ﬁne") == ("“quoted” &amp; ﬁne", ())
    assert fixed("“quoted” &amp; ﬁne", ftfy="full")[0] == '"quoted" & fine'
    assert fixed("IÃ¢â‚¬â„¢m", ftfy="off") == ("IÃ¢â‚¬â„¢m", ())


def test_composition_controls_line_ends_and_white_space():
    assert fixed("e\u0301") == ("é", ("nfc",))
    assert fixed("a\x00b\ufeffc\td") == ("abc\td", ("control_characters",))
    assert fixed("a\r\nb\rc\u2028d") == ("a\nb\nc\nd", ("line_ends",))
    assert fixed("\n\na  \n\n\n\n\nb\t\n") == ("a\n\n\nb", ("whitespace",))
    assert fixed("  indented\n", whitespace="keep") == ("  indented\n", ())


def test_every_change_is_named_in_its_order():
    assert fixed("e\u0301 \r\n\x01")[1] == ("line_ends", "control_characters", "nfc", "whitespace")


@given(st.text(st.sampled_from("aé\x80\x93Ãâ€™©Â\n ñ“”ï»¿œ\xa0中"), max_size=40))
def test_the_short_way_past_ftfy_leaves_nothing_out(text):
    config = {"nfc": False, "control_characters": False, "line_ends": False, "whitespace": "keep"}
    assert fixed(text, **config)[0] == ftfy.fix_text(text, _ENCODING_ONLY)
