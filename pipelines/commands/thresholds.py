"""The commands for choosing filter thresholds: `decide` (threshold sweep) and `explore` (SQL)."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.data_pipeline.corpus.sql import TABLES, open_address, open_corpus
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep
from gristmill.data_pipeline.filters.threshold_sweep import sweep as count
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.commands.option_groups import with_option_groups
from gristmill.pipelines.commands.stage_options import (
    RecipeArgument,
    StageOptions,
    workdir_of,
)
from gristmill.pipelines.console import print_block
from gristmill.pipelines.preflight import check_workdir
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import load_recipe
from gristmill.pipelines.remote_work import RemoteWork, local_folder


@with_option_groups
def decide(
    recipe: RecipeArgument,
    sweep: Annotated[str, typer.Option(help="rule=low:high:n, as gopher_quality.min_words=20:80:5")],
    stage: StageOptions,
    by_language: Annotated[bool, typer.Option("--by-language", help="One row per language of a source.")] = False,
) -> None:
    """Count what each threshold of a rule would keep, by source, before deduplication. Writes no corpus."""
    thresholds = parse_sweep(sweep)
    loaded = load_recipe(recipe, stage.set_ or [])
    folder = workdir_of(loaded, stage.workdir)
    check_workdir(folder)
    engine = stage.open(Reporter.to_terminal(), folder)
    lock = pin(loaded, folder, engine, write=False)
    sources = annotated(loaded.sources, loaded.curate, lock, folder / "cache", engine)
    names = ("source", "language") if by_language else ("source",)
    table = Table(*names, thresholds.rule, "documents kept", "MB kept", "removed by this rule only")
    for row in count(sources, thresholds, engine, by_language):
        where = (row.source, row.language) if by_language else (row.source,)
        table.add_row(*where, f"{row.threshold:g}", f"{row.documents:,}", f"{row.bytes / 1e6:,.1f}", f"{row.taken:,}")
    print_block(table)


def explore(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            parser=local_folder,
            help="The folder of the stage curate or work folder, or its address.",
        ),
    ],
    sql: Annotated[str | None, typer.Option(help="One query; without it, queries are read line by line.")] = None,
) -> None:
    """Query documents, signals and ledger with SQL (DuckDB)."""
    remote = RemoteWork.behind(corpus)
    connection = open_corpus(corpus) if remote is None else open_address(remote.address_of("curate"))
    if sql is not None:
        _print_result(connection, sql)
        return
    print(f"tables: {', '.join(TABLES)}; one query per line, an empty line exits")
    while query := typer.prompt("sql", default="", show_default=False):
        try:
            _print_result(connection, query)
        except RecipeError as error:
            print(error)


def _print_result(connection, query: str) -> None:
    """Prints the result. Raises RecipeError with DuckDB's message for an invalid query."""
    try:
        result = connection.sql(query)
    except Exception as error:  # duckdb.Error is made at run time and has no static name
        raise RecipeError(f"{query}: {error}") from error
    print(result if result is not None else "done")
