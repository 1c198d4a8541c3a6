"""The command `try`: what rules and signals of a Python file would do to a curated corpus, without curating again."""

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
from gristmill.data_pipeline.corpus.document_history import corpus_folder
from gristmill.data_pipeline.readers.document import excerpt
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import UserCode, is_reference, parameter_names, read_user_code, run_file
from gristmill.pipelines.cli.console import print_block
from gristmill.pipelines.workdir.remote import fetched, local_folder

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
    for reason, count in trial.reasons.most_common(10):
        if reason:
            print(f"    {count:,}: {reason}")
    for doc_id, reason, text in trial.examples:
        print(f"    {doc_id}{f' ({reason})' if reason else ''}: {text}")


def _quantiles(numbers: list[float]) -> list[Any]:
    return [f"{value:.4g}" for value in np.quantile(np.array(numbers), QUANTILES)]
