"""Hidden modules cannot be imported inside the block, and can afterwards."""

import importlib
import sys

import pytest

from gristmill.foundation.hidden_modules import hidden_modules


@pytest.fixture
def module_on_disk(tmp_path, monkeypatch):
    (tmp_path / "hidden_example.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hidden_example"
    sys.modules.pop("hidden_example", None)


def test_a_hidden_module_is_not_found_until_the_block_ends(module_on_disk):
    with hidden_modules(module_on_disk), pytest.raises(ModuleNotFoundError, match="hidden_example"):
        importlib.import_module(module_on_disk)
    assert importlib.import_module(module_on_disk).VALUE == 3


def test_an_imported_module_stays(module_on_disk):
    loaded = importlib.import_module(module_on_disk)
    with hidden_modules(module_on_disk):
        assert importlib.import_module(module_on_disk) is loaded
