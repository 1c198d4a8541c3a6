"""The commands that query a corpus: `why`, `similar` and `signatures merge`."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gristmill.data_pipeline.corpus.document_history import corpus_folder
from gristmill.data_pipeline.corpus.document_history import why as document_history
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.dedup.protected import corpus_document_files
from gristmill.data_pipeline.dedup.signatures import find_store, has_store, merge_stores, open_store, sign_corpus
from gristmill.data_pipeline.dedup.similar import Neighbour, similar
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.console import print_block
from gristmill.pipelines.remote_work import fetched, local_folder

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
    for event in document_history(doc_id, fetched(corpus, ("curate",))):
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
    for found in neighbours:
        table.add_row(
            f"{found.similarity:.4f}", f"{found.estimate:.4f}", found.doc_id, found.source, found.excerpt[:60]
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
