"""Packages of the running interpreter, wherever the interpreter finds them."""

import sys

import pytest

from gristmill.data_pipeline.readers.python_docs import python_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError


def test_a_package_that_a_pth_file_adds_is_found(tmp_path, monkeypatch):
    """An environment whose .pth file names another environment's site-packages: sys.path has that folder too."""
    below = tmp_path / "lib" / "site-packages"
    (below / "millstone").mkdir(parents=True)
    (below / "millstone" / "wheel.py").write_text('"""What turns the millstone."""\n')
    source = SourceConfig(name="docs", format="python_docs", part="prose", packages=("millstone",))
    with pytest.raises(InputError, match="no package 'millstone' is installed"):
        python_files(source)
    monkeypatch.setattr(sys, "path", [*sys.path, str(below)])
    assert python_files(source)["millstone/wheel.py"] == str(below / "millstone" / "wheel.py")
