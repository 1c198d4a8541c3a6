"""YAML as recipes are written: what plain values mean, and what is refused with its line."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gristmill.foundation.config import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, read_yaml, write_yaml
from gristmill.foundation.errors import RecipeError


def value(text):
    return read_yaml(text, "r.yaml").value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4M", 4_000_000),
        ("16k", 16_000),
        ("0.5B", 500_000_000),
        ("64Ki", 65_536),
        ("2T", 2 * 10**12),
        ('"4M"', "4M"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("'~'", "~"),
        ("", None),
        ("1e-3", 0.001),
        ("3e4", 30000.0),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("2024-02-30", "2024-02-30"),
        ("'010'", "010"),
        ("-", [None]),
        ("[a, {b: 1}]", ["a", {"b": 1}]),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_plain_values(written, meant):
    assert value(written) == meant
    assert type(value(written)) is type(meant)


def test_anchors_and_merge_keys():
    text = "base: &base {format: jsonl, weight: 1}\nsources:\n- <<: *base\n  weight: 2\n- *base\n"
    read = read_yaml(text, "r.yaml")
    assert read.value["sources"] == [{"format": "jsonl", "weight": 2}, {"format": "jsonl", "weight": 1}]
    assert [read.line(("sources", 0, name)) for name in ("format", "weight")] == [3, 4]
    assert value("a: [{<<: [&x {k: 1}, &y {k: 2, l: 3}]}]") == {"a": [{"k": 1, "l": 3}]}


def test_lines_of_values():
    read = read_yaml("# a comment\nname: x\nsources:\n  - name: s\n    paths:\n      - a\n      - b\n", "r.yaml")
    assert read.line(("sources", 0, "paths", 1)) == 7
    assert read.line(("sources", 0, "weight")) == 4
    assert read.line(("sources", "tuple[...]", 0, "paths")) == 5


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: a: named twice, first in line 1"),
        ("s:\n- {x: 1, x: 2}\n", "r.yaml:2: s.0.x: named twice"),
        ("a: 010", "r.yaml:1: a: 010 is one number"),
        ("a: 0o10", "0o10"),
        ("a: 0b11", "0b11"),
        ("a: 1:30", "r.yaml:1: a: 1:30 is one number"),
        ("a: 190:20:30.15", "190:20:30.15"),
        (BOMB, f"more than {MAX_VALUES:,} values"),
        ("a: &a [*a]", "r.yaml:1: a.0: *a contains itself"),
        ("a: &a {b: {c: *a}}", "*a contains itself"),
        ("a: *nothing", "nothing"),
        ("[" * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 1000, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 1000 + "x", f"nested more than {MAX_DEPTH} deep"),
        ("? " * 1000 + "x", "name must be plain text"),
        ("a:\n  b: " + "9" * 5000, "r.yaml:2: a.b: 999999999999999999999999999999... (5000 characters) is larger"),
        ("a: 99999999999999999999", "larger than any field"),
        ("a: 99999999T", "larger than any field"),
        ("a: 1e999", "larger than any field"),
        ("a: !!python/object/apply:os.system [ls]", "r.yaml:1: a: the tag"),
        ("a: !size 4M", "the tag !size"),
        ("a: !!binary aGk=", "tag"),
        ("!!set {a, b}", "tag"),
        ('a: "\\ud800"', "r.yaml:1:"),
        ('"\\udfff": 1', "r.yaml:1:"),
        ("a: 1\n---\nb: 2", "r.yaml:2: a second document"),
        ("a: [1, 2", ": not YAML"),
        ("a: 'x", "not YAML"),
        ("a: b: c", "r.yaml:1: not YAML"),
        ("a:\n\tb: 1", "r.yaml:2: not YAML"),
        ("a: 1\nb: \x00", "r.yaml:2: not YAML"),
        ("a: 1\nb: \x07", "r.yaml:2: not YAML"),
        ("%YAML 9.1\n---\na: 1", "not YAML"),
        ("[a]: 1", "name must be plain text"),
        (": 1", "r.yaml:1: not YAML"),
        ("{'': 1, ~: 2, ? : 3}", "name must be plain text"),
        ("&x a: 1", "carries a tag or an anchor"),
        ("<<: 3", "takes an alias of a mapping"),
        ("x" * (MAX_CHARACTERS + 1), "longer than"),
        (b"a: 1\nb: \xff", "r.yaml:2: not UTF-8"),
        ("a: 1".encode("utf-16"), "r.yaml:1: not UTF-8"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_refused(text, words):
    with pytest.raises(RecipeError) as refused:
        read_yaml(text, "r.yaml")
    assert words in str(refused.value)
    str(refused.value).encode("utf-8")


def test_an_option_has_no_lines():
    with pytest.raises(RecipeError, match=r"^--set a=010: 010 is one number"):
        read_yaml("010", "--set a=010", name_lines=False)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**6), 10**6)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=12)
        | st.text("ab :#-'\n", max_size=300),
        st.lists,
        max_leaves=6,
    )
)
def test_written_values_are_read_as_they_were(value):
    assert read_yaml(write_yaml({"field": value}), "here").value == {"field": value}


def test_texts_that_look_like_other_values_are_quoted():
    fields = {"size": "4M", "rate": "1e-3", "answer": "no", "time": "1:30", "number": 0.1, "plain": "a b", "4k": 1}
    assert read_yaml(write_yaml(fields), "here").value == fields
    assert 'size: "4M"' in write_yaml(fields) and "plain: a b" in write_yaml(fields)
