"""The commands that ask annotated text: `gristmill decide` before a threshold is changed, `gristmill explore` after."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.data_pipeline.corpus.sql import TABLES, open_corpus
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep
from gristmill.data_pipeline.filters.threshold_sweep import sweep as count
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.console import print_block
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import load_recipe


def decide(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE")],
    sweep: Annotated[str, typer.Option(help="rule=low:high:n, as gopher_quality.min_words=20:80:5")],
    workdir: Annotated[Path | None, typer.Option(help="Where the stages' folders stand (default: work/NAME).")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a field.")] = None,
    by_language: Annotated[bool, typer.Option("--by-language", help="A row for each language of a source.")] = False,
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """What each threshold of a rule would keep, by source, before deduplication. Writes no corpus."""
    wanted = parse_sweep(sweep)
    loaded = load_recipe(recipe, set_ or [])
    folder = workdir or Path("work") / loaded.name
    reporter = Reporter.to_terminal()
    lock = pin(loaded, folder, reporter, workers, update=False, write=True)
    engine = LocalEngine(workers, reporter)
    sources = annotated(loaded.sources, loaded.curate, lock, folder / "cache", engine)
    names = ("source", "language") if by_language else ("source",)
    table = Table(*names, wanted.rule, "documents kept", "MB kept", "taken by it alone")
    for row in count(sources, wanted, engine, by_language):
        where = (row.source, row.language) if by_language else (row.source,)
        table.add_row(*where, f"{row.threshold:g}", f"{row.documents:,}", f"{row.bytes / 1e6:,.1f}", f"{row.taken:,}")
    print_block(table)


def explore(
    corpus: Annotated[
        Path, typer.Argument(metavar="CORPUS", help="The folder of the stage curate, or the work folder.")
    ],
    sql: Annotated[str | None, typer.Option(help="One question; without it, questions are read line by line.")] = None,
) -> None:
    """Ask documents, signals and ledger in SQL (DuckDB)."""
    connection = open_corpus(corpus)
    if sql is not None:
        _answer(connection, sql)
        return
    print(f"tables: {', '.join(TABLES)}; one question a line, an empty line ends")
    while question := typer.prompt("sql", default="", show_default=False):
        try:
            _answer(connection, question)
        except RecipeError as error:
            print(error)


def _answer(connection, question: str) -> None:
    """Prints the answer. Raises RecipeError with DuckDB's words for a question it does not take."""
    try:
        answer = connection.sql(question)
    except Exception as error:  # duckdb.Error is made at run time and has no static name
        raise RecipeError(f"{question}: {error}") from error
    print(answer if answer is not None else "done")
