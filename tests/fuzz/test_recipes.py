"""Recipes after seeded mutations of their text and of their values. The law: a recipe loads, or is refused with a
RecipeError that names the file and a line; never anything else, and never slowly."""

import json
import re
import time

import numpy as np
import pytest
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.recipe_file import find_recipe, load_recipe, recipe_names
from tests.support.mutations import mutate

SEED = 20_260_601
IN_CI, SLOW = 800, 240_000
SLOWEST_SECONDS = 20.0  # of processor time: it takes milliseconds, and what hangs or grows without bound far more
VALUES = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64 - 1,
        10**18,
        0.5,
        -0.0,
        1e-300,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        " ",
        "a",
        "auto",
        "no",
        "010",
        "1:30",
        "8M",
        "9" * 400,
        "../x",
        "~",
        "file:///",
        "\x00",
        "é\u200d",
        ":100:[b]",
    ),
    *([], [[]], [None], {}, {"a": {}}, [1, True, "x"], {"gopher_quality": {"min_words": "x"}}, [{"unit": "line"}] * 3),
)
# YAML that is refused by rules of its own, put where it stands in the way.
SNIPPETS = (
    *(
        b"&a ",
        b"*a ",
        b"!!python/object:x ",
        b"<<: ",
        b"? ",
        b"---\n",
        b"[[[[",
        b"{{{",
        b"'",
        b'"',
        b"\\ud800",
        b"\t",
        b"|\n",
    ),
    *(b"\xff", b"\x00", b"010", b"1:30:00", b": ", b"- ", b"# ", b"%YAML 9.9\n", b"9" * 60, b"true", b".inf", b"1e999"),
)


def mutant(name: str, number: int) -> bytes:
    """A third of them are bytes changed anywhere, a third have a piece of YAML put in, a third a value replaced."""
    rng = np.random.default_rng([SEED, number])
    text = find_recipe(name).read_bytes()
    kind = number % 3
    if kind == 0:
        return mutate(text, rng)
    if kind == 1:
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(text)))
            text = text[:at] + SNIPPETS[rng.integers(len(SNIPPETS))] + text[at + int(rng.integers(0, 4)) :]
        return text
    content = yaml.safe_load(text)
    for _ in range(int(rng.integers(1, 4))):
        replace(content, rng)
    return json.dumps(content).encode()  # JSON is YAML, but for NaN and Infinity, which are text there


def replace(content, rng) -> None:
    """Sets, adds or removes one value somewhere in the content."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    if not keys:
        return
    key = keys[rng.integers(len(keys))]
    if isinstance(content[key], dict | list) and rng.random() < 0.75:
        replace(content[key], rng)
    elif rng.random() < 0.1:
        del content[key]
    elif isinstance(content, dict) and rng.random() < 0.1:
        content[str(key)[:-1]] = content.pop(key)
    else:
        content[key] = json.loads(json.dumps(VALUES[rng.integers(len(VALUES))]))


def check_mutants(tmp_path, numbers) -> dict[str, int]:
    names, path = recipe_names(), tmp_path / "mutant.yaml"
    found = {"loaded": 0, "refused": 0}
    for number in numbers:
        path.write_bytes(mutant(names[number // 3 % len(names)], number))
        begun = time.process_time()
        try:
            load_recipe(str(path))
            found["loaded"] += 1
        except RecipeError as error:
            found["refused"] += 1
            for line in str(error).split("\n"):
                assert re.match(rf"{re.escape(str(path))}(:\d+)?: .", line), (SEED, number, line)
            str(error).encode("utf-8")
        assert time.process_time() - begun < SLOWEST_SECONDS, (SEED, number)
    return found


def test_mutants(tmp_path):
    found = check_mutants(tmp_path, range(IN_CI))
    assert min(found.values()) > IN_CI // 20


@pytest.mark.slow
def test_many_mutants(tmp_path):
    found = check_mutants(tmp_path, range(IN_CI, IN_CI + SLOW))
    assert min(found.values()) > SLOW // 20
