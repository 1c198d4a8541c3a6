"""The commands that query a corpus: `why`, `similar`, `signatures merge`, `decide`, `explore` and `try`."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.table import Table

from gristmill.data_pipeline.annotate.optional_signals import MANY, ONE, values_of
from gristmill.data_pipeline.annotate.tombstones import read_tombstones
from gristmill.data_pipeline.corpus.document_history import TABLES, corpus_folder, open_address, open_corpus
from gristmill.data_pipeline.corpus.document_history import why as document_history
from gristmill.data_pipeline.dedup.near import NearDedupConfig, corpus_document_files
from gristmill.data_pipeline.dedup.near_copies import Neighbour, similar
from gristmill.data_pipeline.dedup.signatures import find_store, has_store, merge_stores, open_store, sign_corpus
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep
from gristmill.data_pipeline.filters.threshold_sweep import sweep as count
from gristmill.data_pipeline.readers.document import excerpt
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter, print_block
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.user_code import UserCode, is_reference, parameter_names, read_user_code, run_file
from gristmill.pipelines.cli.options import RecipeArgument, StageOptions, read_text, with_option_groups, workdir_of
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.index import mix_events
from gristmill.pipelines.stages.preflight import check_workdir
from gristmill.pipelines.workdir.raw_files import lock_raw_files
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
    reporter.info("the corpus has no signature store (near_dedup: {keep_signatures: true}); computing signatures")
    files = corpus_document_files(corpus_folder(corpus))
    with tempfile.TemporaryDirectory() as folder:
        store = sign_corpus(files, NearDedupConfig().scheme, LocalEngine(workers, reporter), Path(folder) / "store")
        return similar(text, store, files, limit, exhaustive)


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
    lock = lock_raw_files(loaded, folder, engine, write=False)
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
    remote = RemoteWork.of_mirror(corpus)
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
        from gristmill.pipelines.explorer.explorer_server import Address, make_app, serve_pages  # the extra `serve`
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    address, remote = Address(host, port, token and token.strip()), RemoteWork.of_mirror(corpus)
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


# The command `try`: what rules and signals of a Python file would do to a curated corpus, without curating again.

FIELD = "curate.filters"
EXAMPLE_CHARACTERS = 100
QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


@dataclass
class Trial:
    """Results of one function for the documents tried so far. examples: (doc_id, reason, excerpt) of removed ones;
    of a signal the documents of its largest values."""

    code: UserCode
    read: int = 0
    removed: int = 0
    removed_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    numbers: list[float] = field(default_factory=list)
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, documents: pa.Table, max_examples: int) -> None:
        rows = zip(
            values_of(self.code, documents, FIELD),
            documents.column("doc_id").to_pylist(),
            documents.column("num_bytes").to_pylist(),
            documents.column("text"),
            strict=True,
        )
        for value, doc_id, num_bytes, text in rows:
            self.read += 1
            if isinstance(value, bool | np.bool_ | str):
                if isinstance(value, str) or not value:
                    self.removed += 1
                    self.removed_bytes += num_bytes
                    self.reasons[value if isinstance(value, str) else ""] += 1
                    if len(self.examples) < max_examples:
                        text_excerpt = excerpt(text.as_py(), EXAMPLE_CHARACTERS)
                        self.examples.append((doc_id, value if isinstance(value, str) else "", text_excerpt))
            elif value is not None:
                self.numbers.append(float(value))


def try_(
    rules: Annotated[str, typer.Argument(metavar="FILE", help="my_rules.py, or my_rules.py:NAME for one function.")],
    on: Annotated[
        Path,
        typer.Option(metavar="CORPUS", parser=local_folder, help="A work folder or the folder of the stage curate."),
    ],
    documents: Annotated[int, typer.Option(min=1, help="Try at most so many documents.")] = 100_000,
    examples: Annotated[int, typer.Option(min=0, help="Removed documents to print, of each rule.")] = 3,
) -> None:
    """Show what rules and signals of a Python file would remove from a corpus, with examples."""
    trials = [Trial(code) for code in functions_of(rules)]
    for table in _documents(corpus_folder(fetched(on, ("curate",))), documents):
        for trial in trials:
            trial.add(table, examples)
    for trial in trials:
        _print(trial)


def functions_of(rules: str) -> list[UserCode]:
    """The functions of the file that take `document` or `documents`; or the one that is named.

    Raises RecipeError if there is none."""
    code = read_user_code(rules if is_reference(rules) else f"{rules}:_", Path("."), FIELD)
    if code is None or code.source is None:
        raise RecipeError(f"{rules!r} is not a Python file; write my_rules.py, or my_rules.py:NAME for one function")
    if is_reference(rules):
        return [code]
    module = run_file(code.file, code.source, FIELD)
    functions = {
        name: member for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__
    }
    names = [
        name
        for name, member in functions.items()
        if callable(member) and not name.startswith("_") and parameter_names(member) in (ONE, MANY)
    ]
    if not names:
        raise RecipeError(f"{rules}: no function has one parameter `document` or `documents`; see docs/extend.md")
    return [code.model_copy(update={"function": name}) for name in names]


def _documents(corpus: Path, limit: int) -> Iterator[pa.Table]:
    """Documents of all splits with their signals, as rules see them, up to the limit."""
    for path in sorted((corpus / "documents").rglob("*.parquet")):
        signals = pq.ParquetFile(corpus / "signals" / path.relative_to(corpus / "documents"))
        texts = pq.ParquetFile(path)
        for batch, measured in zip(texts.iter_batches(1000), signals.iter_batches(1000), strict=True):
            table = pa.table(batch)
            for name in measured.schema.names:
                if name not in table.schema.names:
                    table = table.append_column(name, measured.column(name))
            yield table.slice(0, limit)
            limit -= len(table)
            if limit <= 0:
                return


def _print(trial: Trial) -> None:
    name = trial.code.label
    if trial.numbers:
        table = Table(name, *(f"{share:.0%}" for share in QUANTILES))
        table.add_row(f"{len(trial.numbers):,} documents", *_quantiles(trial.numbers))
        print_block(table)
        return
    share = trial.removed / max(trial.read, 1)
    print(
        f"{name}: would remove {trial.removed:,} of {trial.read:,} documents ({share:.1%}), "
        f"{trial.removed_bytes / 1e6:,.2f} MB of text"
    )
    for reason, times in trial.reasons.most_common(10):
        if reason:
            print(f"    {times:,}: {reason}")
    for doc_id, reason, text in trial.examples:
        print(f"    {doc_id}{f' ({reason})' if reason else ''}: {text}")


def _quantiles(numbers: list[float]) -> list[Any]:
    return [f"{value:.4g}" for value in np.quantile(np.array(numbers), QUANTILES)]
