"""Repair of common deviations from the JSON standard: byte order marks, NaN and Infinity, lone surrogates."""

import json
import math
from typing import Any

from gristmill.data_pipeline.readers.encodings import BYTE_ORDER_MARK, UTF8_MARK

SURROGATES, CONSTANTS = "lone_surrogates", "json_constants"
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


def repaired(line: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return (the value, the names of the repairs that were needed).

    A leading byte order mark is dropped; NaN, Infinity and numbers outside the range of a float become null; a lone
    surrogate, escaped or encoded, becomes U+FFFD; a surrogate pair encoded as two characters becomes the one it stands
    for. Raises UnicodeDecodeError for other invalid UTF-8, ValueError if the repaired line is still not JSON."""
    repairs = []
    if line.startswith(UTF8_MARK):
        repairs.append(BYTE_ORDER_MARK)
        line = line[len(UTF8_MARK) :]
    constants = 0

    def null(_: str) -> None:
        nonlocal constants
        constants += 1

    def number(written: str) -> float | None:
        value = float(written)
        if math.isfinite(value):
            return value
        null(written)
        return None

    def integer(written: str) -> int | float | None:
        value = int(written) if len(written) < 21 else None
        return value if value is not None and MIN_INTEGER <= value <= MAX_INTEGER else number(written)

    try:
        value = json.loads(_decoded(line), parse_constant=null, parse_float=number, parse_int=integer)
        whole = _without_surrogates(value)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if constants:
        repairs.append(CONSTANTS)
    if whole is not value:
        repairs.append(SURROGATES)
    return whole, tuple(repairs)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        try:
            return line.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise error from None


def _without_surrogates(value: Any) -> Any:
    """The value itself if its strings hold no surrogates, else a repaired copy."""
    if type(value) is str:
        return without_surrogates(value)
    if type(value) is dict:
        pairs = {_without_surrogates(key): _without_surrogates(held) for key, held in value.items()}
        same = all(a is b and value[a] is pairs[b] for a, b in zip(value, pairs, strict=False))
        return value if same and len(pairs) == len(value) else pairs
    if type(value) is list:
        items = [_without_surrogates(held) for held in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else items
    return value


def without_surrogates(text: str) -> str:
    """The text itself if it holds no surrogates; else with pairs joined and U+FFFD for each lone one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
