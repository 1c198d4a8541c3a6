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


def test_descriptions_and_licences_of_installed_packages_are_prose(tmp_path, monkeypatch):
    """Those that the package's RECORD names and that exist."""
    below = tmp_path / "site-packages"
    info = below / "millstone-1.0.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Millstone\nVersion: 1.0\n\nIt turns.\n")
    (info / "licenses" / "LICENSE, old").write_text("Free.\n")
    own_files = ["METADATA", "licenses/LICENSE, old", "COPYING", "RECORD"]
    record = ["millstone/licence.py,,", *(f'"{info.name}/{name}",,' for name in own_files)]
    (info / "RECORD").write_text("\n".join(record) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(below)])
    found = python_files(SourceConfig(name="docs", format="python_docs", part="prose"))
    own = {name: path for name, path in found.items() if name.startswith("dist/millstone/")}
    assert own == {
        "dist/millstone/METADATA": str(info / "METADATA"),
        "dist/millstone/licenses/LICENSE, old": str(info / "licenses" / "LICENSE, old"),
    }
