"""A deferred module is imported at the first access to an attribute."""

import sys

import pytest

from gristmill.foundation.startup import DeferredModule


def test_it_is_imported_at_the_first_access(tmp_path, monkeypatch):
    (tmp_path / "deferred_example.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    deferred = DeferredModule("deferred_example")
    assert "deferred_example" not in sys.modules
    assert deferred.VALUE == 3
    assert sys.modules.pop("deferred_example").VALUE == 3


def test_a_missing_module_is_an_import_error_at_the_first_access():
    deferred = DeferredModule("no_such_module_of_any_name")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_any_name"):
        deferred.anything  # noqa: B018
