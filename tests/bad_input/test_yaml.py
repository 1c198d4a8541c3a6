"""Recipes with invalid or ambiguous YAML: an error with line and field."""

from bad_input import Case, each, small

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


def text(name, content, *words):
    return Case(name, "check bad.yaml", ("bad.yaml", *words), files={"bad.yaml": content})


def option(name, value, *words):
    return Case(f"--set {name}", f"check small.yaml --set '{value}'", (f"--set {value}", *words))


CASES = [
    text("empty", "", "this is empty"),
    text("a comment alone", "# nothing\n", "this is empty"),
    text("a list", "- name: x\n", "this is a list"),
    text("a sentence", "hello", "this is a str"),
    text("a number", "12", "this is a int"),
    text("not UTF-8", b"name: caf\xe9\n", "bad.yaml:1: not UTF-8"),
    text("UTF-16", "name: x".encode("utf-16"), "not UTF-8"),
    text("a picture", b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8"),
    text("NUL", "name: x\nseed: \x00\n", "bad.yaml:2: not YAML"),
    text("a control character", "name: x\nseed: \x07\n", "bad.yaml:2: not YAML"),
    text("a tab", "curate:\n\tfilters: []\n", "bad.yaml:2: not YAML"),
    text("an open bracket", "name: [x\n", "not YAML"),
    text("an open quote", "name: 'x\n", "not YAML"),
    text("two colons", "name: a: b\n", "bad.yaml:1: not YAML"),
    text("two documents", "name: x\n---\nname: y\n", "bad.yaml:2: a second document"),
    text("another version", "%YAML 9.9\n---\nname: x\n", "not YAML"),
    text("an unknown directive's tag", "%TAG ! tag:x,2000:\n---\nname: !y z\n", "the tag"),
    text("a key twice", "name: x\nseed: 1\nname: y\n", "bad.yaml:3: name: named twice, first in line 1"),
    text("a key twice inside", small() + "evaluate: {limit: 1, limit: 2}\n", "evaluate.limit: named twice"),
    text("a section twice", small() + "model: {layers: 1}\n", "model: named twice"),
    text("octal", "seed: 010\n", "bad.yaml:1: seed: 010 is one number", "quote it"),
    text("octal of YAML 1.2", "seed: 0o17\n", "seed: 0o17 is one number"),
    text("binary", "seed: 0b11\n", "seed: 0b11 is one number"),
    text("base 60", "seed: 1:30\n", "bad.yaml:1: seed: 1:30 is one number"),
    text("base 60, three parts", "seed: 1:30:59\n", "1:30:59 is one number"),
    text("an alias bomb", BOMB, "more than 200,000 values"),
    text("a recursive list", "name: &a [*a]\n", "bad.yaml:1: name.0: *a contains itself"),
    text("a recursive mapping", "curate: &a {filters: {x: *a}}\n", "*a contains itself"),
    text("an alias of nothing", "name: *other\n", "other"),
    text("100,000 brackets", "name: " + "[" * 100_000, "bad.yaml:1:", "nested more than 40 deep"),
    text("1,000 braces", "name: " + "{a: " * 1000, "nested more than 40 deep"),
    text("1,000 dashes", "- " * 1000 + "x", "nested more than 40 deep"),
    text("1,000 question marks", "? " * 1000 + "x", "a field's name must be plain text"),
    text(
        "a number of 5,000 digits", f"seed: {'9' * 5000}\n", "bad.yaml:1: seed:", "(5000 characters) is larger than any"
    ),
    text("a number of 20 digits", "seed: 99999999999999999999\n", "larger than any field accepts"),
    text("a huge size", "seed: 99999999T\n", "99999999T is larger than any"),
    text("a huge power", "seed: 1e999\n", "1e999 is larger than any"),
    text("a Python object", "name: !!python/object/apply:os.system [ls]\n", "bad.yaml:1: name: the tag"),
    text("a tag of ours once", "seed: !size 4M\n", "the tag !size is not read"),
    text("binary data", "name: !!binary aGk=\n", "the tag"),
    text("a set", "name: !!set {a}\n", "the tag"),
    text("a tagged key", "!!str name: x\n", "carries a tag or an anchor"),
    text("a lone surrogate", 'name: "\\ud800"\n', "bad.yaml:1:"),
    text("a lone surrogate as a key", '"\\udfff": 1\n', "bad.yaml:1:"),
    text("a list as a key", "[a]: 1\n", "bad.yaml:1:", "a field's name must be plain text"),
    text("no name before a colon", "{: 1}\n", "bad.yaml:1:"),
    text("a merge of no mapping", "<<: 3\n", "takes an alias of a mapping"),
    text("too long", "# " + "x" * 2_100_000, "longer than 2,000,000 characters"),
    text("too many values", "name: [" + "1," * 210_000 + "]", "more than 200,000 values"),
    option("octal", "seed=010", "010 is one number"),
    option("base 60", "train.tokens=1:30", "1:30 is one number"),
    option("brackets", "seed=" + "[" * 3000, "nested more than 40 deep"),
    option("open bracket", "sources.0.paths=[a", "not YAML"),
    option("digits", "seed=" + "9" * 5000, "is larger than any"),
    option("tag", "name=!!python/name:os.system x", "the tag"),
    option("key twice", "model={layers: 1, layers: 2}", "layers: named twice"),
    option("alias", "name=&a [*a]", "contains itself"),
    option("no value", "train.tokens", "write field=value"),
    option("no field", "=3", "write field=value"),
    option("position", "sources.7.name=x", "'7' must be a position from 0 to 0"),
    option("negative position", "sources.-1.name=x", "'-1' must be a position"),
    option("position of another script", "sources.².name=x", "must be a position"),
    option("fields of a plain value", "name.inner=x", "'name' is a plain value"),
    option("unknown", "train.tokns=8M", "train.tokns: unknown field, did you mean 'tokens'?"),
    option("wrong type", "train.tokens=many", "train.tokens: Input should be a valid integer"),
    option("boolean", "model.layers=true", "model.layers: true is not a valid value here"),
]


@each(CASES)
def test_yaml(case, expect_error):
    expect_error(case)
