"""Compiled functions and the cache on disk."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "data_pipeline"
FILES = sorted([*(ROOT / "dedup").glob("*.py"), *(ROOT / "decontamination").glob("*.py")])


def compiled(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("njit" in ast.unparse(decorator) for decorator in f.decorator_list)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_kernel_calls_one_of_another_file(path: Path):
    # numba's cache would go on with the old copy when only the other file changes.
    tree = ast.parse(path.read_text())
    imported = {
        name.asname or name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gristmill")
        for name in node.names
    }
    for function in compiled(tree):
        calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        assert not (calls & imported) - {"load64", "trailing_zeros"}
