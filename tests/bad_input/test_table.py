"""The table of bad inputs: its size, an expected message in every row, unique names."""

import importlib.util
from pathlib import Path

from bad_input import small

from gristmill.pipelines.recipes.config import Recipe

AREAS = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
FEWEST_CASES = 300


def cases_of(path):
    spec = importlib.util.spec_from_file_location(f"table_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES


def test_every_row_says_what_its_message_holds():
    for path in AREAS:
        cases = cases_of(path)
        names = [case.name for case in cases]
        assert sorted(set(names)) == sorted(names), path.name
        for case in cases:
            assert case.code in (1, 2), case.name
            assert case.words and all(word.strip() for word in case.words), case.name


def test_the_table_is_large():
    assert sum(len(cases_of(path)) for path in AREAS) >= FEWEST_CASES


def test_the_small_recipe_is_right_so_that_what_is_refused_is_the_change(tmp_path):
    from gristmill.pipelines.recipes.recipe_file import load_recipe

    path = tmp_path / "small.yaml"
    path.write_text(small("seed: 7"))
    assert load_recipe(str(path)) == Recipe.model_validate(load_recipe(str(path)).model_dump())
    assert load_recipe(str(path)).seed == 7
