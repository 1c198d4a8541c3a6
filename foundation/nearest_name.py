"""The known names that are most similar to a misspelt one, for error messages."""

import difflib
from collections.abc import Iterable

MAX_COMPARED_CHARS = 200  # the comparison takes time quadratic in the length


def nearest_names(name: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `limit` known names whose similarity ratio (difflib, 0 to 1) reaches the cutoff, most similar first."""
    return difflib.get_close_matches(name[:MAX_COMPARED_CHARS], list(known), n=limit, cutoff=cutoff)


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name; None if none reaches the cutoff.

    "min_word" among ["min_words", "max_words"] -> "min_words"."""
    return next(iter(nearest_names(name, known, limit=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question "did you mean 'min_words'?" if a known name is similar to the given one, else `otherwise`."""
    near = nearest_name(name, known)
    return f"did you mean {near!r}?" if near else otherwise
