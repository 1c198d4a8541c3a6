"""The commands that query a corpus: `why`, `similar` and `signatures merge`."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.data_pipeline.annotate.tombstones import read_tombstones
from gristmill.data_pipeline.corpus.document_history import TABLES, corpus_folder, open_address, open_corpus
from gristmill.data_pipeline.corpus.document_history import why as document_history
from gristmill.data_pipeline.dedup.near import NearDedupConfig, corpus_document_files
from gristmill.data_pipeline.dedup.near_copies import Neighbour, similar
from gristmill.data_pipeline.dedup.signatures import find_store, has_store, merge_stores, open_store, sign_corpus
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep
from gristmill.data_pipeline.filters.threshold_sweep import sweep as count
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.cli.options import RecipeArgument, StageOptions, with_option_groups, workdir_of
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.mix_table import mix_events
from gristmill.pipelines.stages.preflight import check_workdir
from gristmill.pipelines.workdir.raw_files import pin
from gristmill.pipelines.workdir.remote import RemoteWork, fetched, local_folder

signatures_app = typer.Typer(no_args_is_help=True, help="MinHash signature stores of corpora.")


def why(
    doc_id: Annotated[str, typer.Argument(metavar="DOC_ID", help="32 hex digits, as in the column doc_id.")],
    corpus: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            parser=local_folder,
            help="The folder of the stage curate or the work folder, or its address.",
        ),
    ],
) -> None:
    """Show what each curation step did to one document, with values and thresholds."""
    folder = fetched(corpus, ("curate",))
    workdir = folder.parent if folder.name == "curate" else folder
    for event in [*document_history(doc_id, folder), *mix_events(doc_id, workdir)]:
        print(f"{event.step}: {event.outcome}")
        for line in event.lines:
            print(f"    {line}")


def similar_command(
    corpus: Annotated[
        Path,
        typer.Option(metavar="DIR", parser=local_folder, help="A work folder, curate folder or signature store."),
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="A UTF-8 text file; - for standard input.")],
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of documents.")] = 10,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Compare all signatures, not only LSH buckets.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes, if signatures must be computed first.")] = 2,
) -> None:
    """Find the documents of a corpus most similar to a text, with exact Jaccard similarity."""
    neighbours = nearest(read_text(text), fetched(corpus, ("curate",)), limit, exhaustive, workers)
    if not neighbours:
        print("no similar document found")
        return
    table = Table("similarity", "estimate", "document", "source", "excerpt")
    for neighbour in neighbours:
        table.add_row(
            f"{neighbour.similarity:.4f}",
            f"{neighbour.estimate:.4f}",
            neighbour.doc_id,
            neighbour.source,
            neighbour.excerpt[:60],
        )
    print_block(table)


def nearest(text: str, corpus: Path, limit: int, exhaustive: bool, workers: int) -> list[Neighbour]:
    """Searches the corpus' signature store; without one, signatures are computed for this query."""
    if has_store(corpus):
        store = open_store(find_store(corpus))
        return similar(text, store, store.document_files(), limit, exhaustive)
    reporter = Reporter.to_terminal()
    reporter.say("the corpus has no signature store (near_dedup: {keep_signatures: true}); computing signatures")
    files = corpus_document_files(corpus_folder(corpus))
    with tempfile.TemporaryDirectory() as folder:
        store = sign_corpus(files, NearDedupConfig().scheme, LocalEngine(workers, reporter), Path(folder) / "store")
        return similar(text, store, files, limit, exhaustive)


def read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); name a file, or - for standard input"
        ) from error


@signatures_app.command("merge")
def merge_command(
    corpora: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Work folders, curate folders or signature stores.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The new store's folder.")],
) -> None:
    """Merge signature stores, for `near_dedup.protected` and `gristmill similar`."""
    store = merge_stores([find_store(corpus) for corpus in corpora], output)
    print(f"{output}: {sum(stored.documents for stored in store.files)} documents in {len(store.files)} files")


# The commands for choosing filter thresholds: `decide` (threshold sweep) and `explore` (SQL).


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
    engine = stage.open(stage.reporter(), folder)
    lock = pin(loaded, folder, engine, write=False)
    tombstones = read_tombstones(folder)
    sources = annotated(loaded.sources, loaded.curate, lock, folder / "cache", engine, tombstones)
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
    web: Annotated[bool, typer.Option("--web", help="Serve pages for a browser, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="--web: address; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="--web: port; 0 takes a free one.")] = 8001,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="--web: a file with the token of requests.")
    ] = None,
) -> None:
    """Query documents, signals and ledger with SQL (DuckDB), or look at them in a browser."""
    if web:
        _explore_web(corpus, host, port, None if token_file is None else read_text(token_file))
        return
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


def _explore_web(corpus: Path, host: str, port: int, token: str | None) -> None:
    try:
        from gristmill.pipelines.explorer.corpus import ExploredCorpus
        from gristmill.pipelines.explorer.server import Address, make_app, serve_pages  # the extra `serve`
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    address, remote = Address(host, port, token and token.strip()), RemoteWork.behind(corpus)
    address.check()
    explored = ExploredCorpus(corpus if remote is None else remote.stored_files("curate"))
    serve_pages(make_app(explored, address.token), address, f"exploring {explored.files.place}", Reporter.to_terminal())


def _print_result(connection, query: str) -> None:
    """Prints the result. Raises RecipeError with DuckDB's message for an invalid query."""
    try:
        result = connection.sql(query)
    except Exception as error:  # duckdb.Error is made at run time and has no static name
        raise RecipeError(f"{query}: {error}") from error
    print(result if result is not None else "done")
