"""README, CONTRIBUTING and docs/ name only existing files, folders, links, commands and options."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gristmill.foundation.user_code import is_reference
from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.recipes.schema import recipe_schema

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("foundation", "data_pipeline", "tokenizers", "training", "evaluation", "pipelines", "tests", "benchmarks")
FILES = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
# Files that the pages mention and we do not have: Megatron-LM's, article-extraction-benchmark's, a reader's own.
NOT_OURS = {
    *("my_objective.py", "my_rules.py", "my_reader.py", "my_tasks.py"),
    *("filter_ngrams.py", "preprocess_data.py", "evaluate.py", "__init__.py"),
}
COMMANDS: Any = typer.main.get_command(app)


def words_after_gristmill(text: str) -> list[list[str]]:
    """The words after `gristmill ` in code: inline code, and lines of code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    code = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    outside = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    code += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return [match.split() for line in code for match in re.findall(r"^(?:\.venv/bin/)?gristmill (.*)", line)]


def resolve(words: list[str]) -> tuple[set[str], list[str]]:
    """Options of the command that the words begin with, and the other words. Raises KeyError for an unknown command."""
    command: Any = COMMANDS.commands[words[0]]
    rest = words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
        options |= {option for parameter in command.params for option in parameter.opts}
    return options, rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_files_exist(page):
    """A path may begin at any folder: `model/causal.py` is training/model/attention/attention.py."""
    for name in set(re.findall(r"(?<![\w/*.:-])[\w/.-]*\w\.py\b(?!\w)", page.read_text("utf-8"))) - NOT_OURS:
        if "NAME" not in name:
            assert any(path == name or path.endswith("/" + name) for path in FILES), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_folders_and_modules_exist(page):
    text = page.read_text("utf-8")
    for name in re.findall(r"`((?:" + "|".join(FOLDERS) + r")/(?:[\w./-]*/|[\w./-]+\.(?:md|yaml))?)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"-m (gristmill(?:\.\w+)+)", text):
        assert name.removeprefix("gristmill.").replace(".", "/") + ".py" in FILES, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    for words in words_after_gristmill(page.read_text("utf-8")):
        if not re.match(r"[a-z]", words[0]):
            continue
        options, rest = resolve(words)
        for word in rest:
            if match := re.match(r"\[?(--[a-z][a-z-]*)", word):
                assert match[1] in options, f"gristmill {' '.join(words)}: no option {match[1]}"


def test_tests_named_in_contributing_exist():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(names) == 20
    for path, name in names:
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"


CHOSEN_NAMES = {"dclm", "mine", "subject"}  # of scores and labels, which the recipe chooses


def property_names(schema: Any) -> set[str]:
    """Names of all fields anywhere in a JSON schema."""
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    own = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return set(own).union(*map(property_names, children))


def keys_of(value: Any) -> set[str]:
    """All keys, without those of an objective's own options."""
    if isinstance(value, dict):
        value = {key: None if key == "objective_options" else member for key, member in value.items()}
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return set(value if isinstance(value, dict) else ()).union(*map(keys_of, children))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("planning.md", "evaluation.md")], ids=lambda page: page.name
)
def test_recipe_fields_exist(page):
    """Keys of YAML blocks, and dotted names such as `train.batch_tokens`, on pages whose YAML is recipes only."""
    text, fields = page.read_text("utf-8"), property_names(recipe_schema())
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    keys = set().union(*(keys_of(yaml.safe_load(block)) for block in blocks))
    names = {key for key in keys if is_reference(key) or key.removeprefix("quality_") in CHOSEN_NAMES}
    assert keys - fields - names == set()
    dotted = re.findall(r"`(?:curate|tokenizer|index|model|train|evaluate)\.([a-z_.]+)`", text)
    endings = {"json", "jsonl", "model", "py", "yaml"}
    assert {name.split(".")[-1] for name in dotted} - fields - endings == set()


def test_the_readme_claims_what_the_results_of_whole_runs_say():
    measured = {}
    for line in (ROOT / "docs" / "results.md").read_text("utf-8").split("## Parts of a run")[0].splitlines():
        if line.startswith("| curation.py"):
            _, _, figure, ours, peer, _, ratio, _ = (cell.strip() for cell in line.strip("|").split("|"))
            measured[figure] = (ours, peer.split(" ")[0], ratio)
    rows = re.findall(r"^\| `(curate_\w+)` \|[^|]*\| (\S+) \| (\S+) \| (\S+) \|$", README.read_text("utf-8"), re.M)
    claims = {figure: tuple(numbers) for figure, *numbers in rows}
    assert len(claims) > 4 and claims == {figure: measured[figure] for figure in claims}
