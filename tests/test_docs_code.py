"""Code blocks of the pages: Python that parses and whose names exist, shell scripts and data that parse."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(language, body, id=f"{page.name}:{language}:{number}")
    for page in PAGES
    for number, (language, body) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    )
]
PARSERS = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
    "yml": lambda text: [*yaml.safe_load_all(text)],
}
SHELLS = ("sh", "bash")
NOT_CHECKED = ("html", "sql")  # of a page and of the explorer, which its own tests run
PYTHON = [block for block in BLOCKS if block.values[0] == "python"]


@pytest.mark.parametrize(
    "language, body", [block for block in BLOCKS if block.values[0] not in ("python", *NOT_CHECKED)]
)
def test_scripts_and_data_parse(language, body):
    if language in SHELLS:
        done = subprocess.run(["bash", "-n"], input=body, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    else:
        PARSERS[language](body)


@pytest.mark.parametrize("language, body", PYTHON)
def test_names_that_python_blocks_import_exist(language, body):
    """Also the names of `gristmill`, and the keyword arguments of its functions."""
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        elif isinstance(node, ast.Import):
            for name in node.names:
                assert importlib.util.find_spec(name.name) is not None, name.name
        elif isinstance(node, ast.Call) and (function := public_function(node.func)) is not None:
            inspect.signature(function).bind(
                *(None for _ in node.args), **{key.arg: None for key in node.keywords if key.arg}
            )


def public_function(node: ast.expr) -> object:
    """The function of `gristmill.NAME(...)`; None for other calls."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gristmill":
        return getattr(importlib.import_module("gristmill"), node.attr)
    return None
