"""The house of docs/architecture.md: five folders on five floors, imports downwards only, no package faces."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"foundation": 0, "data_pipeline": 1, "training": 2, "tokenizers": 2, "evaluation": 3, "pipelines": 4}
FILES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))
NO_TORCH = (
    "foundation/",
    "data_pipeline/",
    "tokenizers/",
    "training/planner/",
    "training/config.py",
    "evaluation/config.py",
)


def module_name(path: Path) -> str:
    return "gristmill." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Modules named by `import` and `from` statements that run when the file is imported."""
    found = set()
    waiting: list[ast.AST] = list(ast.parse(path.read_text("utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += list(ast.iter_child_nodes(node))
    return found


GRAPH = {module_name(path): imports(path) for path in FILES}


def test_no_init_files():
    """One in tokenizers/ would make `import tokenizers` load our folder in place of Hugging Face's package."""
    assert [str(path) for folder in FLOORS for path in (ROOT / folder).rglob("__init__.py")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    own = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "gristmill":
            assert parts[0] not in FLOORS or parts[0] == "tokenizers", f"{name}: write gristmill.{name}"
            continue
        other = parts[1]
        assert other == own or FLOORS[other] < FLOORS[own], (
            f"{path.relative_to(ROOT)} imports {name}, which stands above"
        )


def test_no_circles():
    """Walks the import graph depth first; a file met again on its own path closes a circle."""
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for name in sorted(GRAPH[module]):
            if name in GRAPH:
                visit(name, (*trail, module))
        done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_every_import_of_ours_names_a_file():
    for module, names in GRAPH.items():
        for name in names:
            if name.startswith("gristmill."):
                assert name in GRAPH or name.rpartition(".")[0] in GRAPH, f"{module} imports {name}: no such file"


def test_packages_listed_are_the_tree():
    """A missing one still imports from an editable install and is missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    tree = {module_name(path).rpartition(".")[0] for path in FILES}
    tree |= {
        f"gristmill.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for folder in FLOORS
        for path in (ROOT / folder).rglob("*.yaml")
    }
    assert listed == tree


def test_torch_stays_out_of_the_ground_floor():
    for path in FILES:
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(NO_TORCH):
            roots = {name.split(".")[0] for name in imports(path)}
            assert "torch" not in roots, f"{relative} imports torch"


def test_all_dependencies_are_pinned():
    """A dependency without a pin would install whatever is newest on the day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {
        requirement.split(">")[0].split("<")[0].split("=")[0].split("[")[0].lower().replace("_", "-")
        for requirement in wanted
    }
    assert names - pinned == set()
