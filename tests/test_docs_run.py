"""Every runnable block of the pages is run: commands, Python, recipes and queries, in a folder with small files.

A plain run parses every command with the program's own parser; the slow test runs the blocks, page by page."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_workplace import make_workplace, run_block, substituted
from page_blocks import COMMAND, PAGES, ROOT, all_blocks, shell_lines

from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.cli.data import StageGroup

BLOCKS = [block for block in all_blocks() if block.kind not in ("figure", "data")]
RUN_HERE = [block for block in BLOCKS if block.exempt is None]
# Why a block is not run, by the first word of its comment, and how many may be: a new one is argued for here.
MOST_NOT_RUN = {"bucket": 2, "cluster": 6, "make": 1, "minutes": 10}
MOST_RUN_ELSEWHERE = 11


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    make_workplace(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in RUN_HERE}))
def test_the_blocks_of_a_page_run_in_their_order(page, workplace):
    failures = [failure for block in RUN_HERE if block.page == page and (failure := run_block(block, workplace))]
    assert not failures, "\n\n".join(failures)


def test_blocks_that_are_not_run_have_a_reason():
    reasons = Counter(
        block.exempt[1].partition(":")[0] for block in BLOCKS if block.exempt and "not" in block.exempt[0]
    )
    assert reasons == MOST_NOT_RUN
    elsewhere = [block.exempt[1] for block in BLOCKS if block.exempt and block.exempt[0] == "run by"]
    assert len(elsewhere) == MOST_RUN_ELSEWHERE
    assert [path for path in elsewhere if not (ROOT / path).is_file()] == []


def test_a_command_with_a_wrong_option_or_argument_does_not_parse():
    for line in (
        "gristmill curate",
        "gristmill why x --corpus",
        "gristmill data look x",
        "gristmill plan r.yaml --depth",
    ):
        with pytest.raises(Exception, match=r"Missing|[Nn]o (such|command)|requires an arg"):
            parse(line)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "shell"], ids=lambda block: block.id)
def test_commands_parse(block):
    for line in shell_lines(block.body):
        parse(substituted_without_files(block.page, line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_parse(page):
    """Those with arguments: `gristmill why` alone is a command's name."""
    text = re.sub(r"^```\w*\n.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`(gristmill [^`]+)`", text):
        words = " ".join(span.split())
        if re.search(r"[A-Z.=\"]", words) and not re.search(r"\.\.\.(?!$)|\[", words):
            parse(substituted_without_files(page.name, words.removesuffix("...")))


def substituted_without_files(page: str, line: str) -> str:
    return substituted(page, line.replace("DOC_ID", "d").replace("3f2a...", "d"), Path(".")).replace(" N", " 2")


def parse(line: str) -> None:
    """The command's own parser reads the line; nothing runs. Raises a UsageError of click, as typer has it."""
    words = shlex.split(re.split(r" (?:2?>|<|&&|\|) ?", line)[0])
    programs = [k for k, word in enumerate(words) if word.endswith(("gristmill", "gristmill.pipelines.cli.main"))]
    if not COMMAND.match(line) or not programs:
        return
    command: Any = typer.main.get_command(app)
    name, rest = "gristmill", words[programs[0] + 1 :]
    while rest and rest[0] in getattr(command, "commands", ()):
        name, command, rest = rest[0], command.commands[rest[0]], rest[1:]
    assert name != "gristmill" or rest[0].startswith("-"), f"no command {rest[0]}"
    context = command.make_context(name, [*rest])
    if hasattr(command, "commands") and not isinstance(command, StageGroup) and rest and not rest[0].startswith("-"):
        command.resolve_command(context, rest)
