"""The table of docs/models.md is what a tiny model of each family does today."""

import pytest

from gristmill.evaluation.convert.huggingface import FAMILIES

models_table = pytest.importorskip("tests.support.models_table")


def test_the_page_is_current():
    table = models_table.table()
    for family in FAMILIES:
        assert f"| {family.architecture} |" in table
    assert models_table.page_with(table) == models_table.PAGE.read_text(), (
        "run `python -m tests.support.models_table` and commit docs/models.md"
    )
