"""Signals and rules of the user's own: functions of a document, or of a table of documents, that the recipe names.

A function with one parameter `document` gets a dictionary: doc_id, text, url, language, metadata (a dictionary), the
detected language and every signal. One with the parameter `documents` gets a pyarrow.Table with these columns (metadata
as JSON) and returns a value a row. A rule returns True to keep a document, False or a reason to remove it; a signal
returns a number, or None. Texts are those after all line edits; documents without text are not passed."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import UserCode, defined_at, errors_named, parameter_names

ONE, MANY = ("document",), ("documents",)
HIDDEN = ("raw_digest", "record", "text_hash", "text_key", "changes", "unreadable", "reason", "offset", "excerpt")


class OwnSignal(Config):
    """is_rule: whether the function decides; its column then holds 1 for documents that it removes, 0 for others."""

    code: UserCode
    is_rule: bool = False

    @property
    def name(self) -> str:
        """The column: my_rules_no_lorem."""
        return self.code.label.replace(".", "_")

    @property
    def field(self) -> str:
        """The recipe's field that names the function."""
        return "curate.filters" if self.is_rule else "curate.signals"

    def arrow_field(self) -> pa.Field:
        return pa.field(self.name, pa.int64() if self.is_rule else pa.float64())

    def column(self, table: pa.Table) -> pa.Array:
        """One value a row; null for rows without text. table: the columns of an annotated file so far."""
        has_text = pc.and_(pc.is_null(table.column("unreadable")), pc.greater(table.column("num_chars"), 0))
        places = np.flatnonzero(has_text.to_numpy(zero_copy_only=False))
        visible = table.drop_columns([name for name in HIDDEN if name in table.schema.names])
        values = values_of(self.code, visible.take(pa.array(places)), self.field)
        column = np.full(len(table), np.nan)
        column[places] = [self._number(value) for value in values]
        return pa.array(column, from_pandas=True).cast(self.arrow_field().type)

    def _number(self, value: Any) -> float:
        """Raises RecipeError naming the function for a value of another kind."""
        if self.is_rule:
            if isinstance(value, bool | np.bool_ | str):
                return float(isinstance(value, str) or not value)
            wanted = "True to keep a document, False or a reason (text) to remove it"
        else:
            if value is None:
                return np.nan
            if isinstance(value, bool | int | float | np.number | np.bool_) and np.isfinite(value):
                return float(value)
            wanted = "a finite number, or None"
        function, _ = measure(self.code, self.field)
        raise RecipeError(
            f"{self.field}: {defined_at(function)}: {self.code.function} returned {value!r:.80}; {wanted}"
        )


@lru_cache(maxsize=64)
def measure(code: UserCode, field: str) -> tuple[Callable[[Any], Any], bool]:
    """(the function, whether it takes a table). Raises RecipeError for a file that does not load, or another
    signature."""
    function = code.load(field)
    with errors_named(field, "has no signature", code.file):
        names = parameter_names(function)
    if names not in (ONE, MANY):
        raise RecipeError(
            f"{field}: {defined_at(function)}: {code.function}({', '.join(names)}) must have one parameter, `document` "
            "(a dictionary) or `documents` (a pyarrow.Table); rename its parameters"
        )
    return function, names == MANY


def values_of(code: UserCode, documents: pa.Table, field: str) -> Sequence[Any]:
    """Values of the function by row. Raises RecipeError with file and line of its errors, and the document."""
    function, takes_table = measure(code, field)
    if not len(documents):
        return []
    if takes_table:
        with errors_named(
            field, f"{code.function} fails on a table of {len(documents)} documents", defined_at(function)
        ):
            values = function(documents)
            values = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)
        if len(values) != len(documents):
            raise RecipeError(
                f"{field}: {defined_at(function)}: {code.function} returned {len(values)} values for {len(documents)} "
                "documents; return one a row"
            )
        return values
    return [_value(function, row, code, field) for row in documents.to_pylist()]


def _value(function: Callable[[Any], Any], row: dict[str, Any], code: UserCode, field: str) -> Any:
    document = {**row, "metadata": orjson.loads(row["metadata"] or "{}")}
    with errors_named(field, f"{code.function} fails on document {row['doc_id']}", defined_at(function)):
        return function(document)


def own_columns(signals: Sequence[OwnSignal], table: pa.Table) -> list[pa.Array]:
    return [signal.column(table) for signal in signals]


def check_own_signals(signals: Sequence[OwnSignal], columns: Mapping[str, Any] | Sequence[str]) -> None:
    """Loads the functions. Raises RecipeError if one cannot be used, or its name is that of another column."""
    names = [signal.name for signal in signals]
    for signal in signals:
        measure(signal.code, signal.field)
        if signal.name in columns or names.count(signal.name) > 1:
            raise RecipeError(
                f"{signal.field}: {signal.code.label} would be the column {signal.name!r}, which there is already; "
                "rename the function or its file"
            )
