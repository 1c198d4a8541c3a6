"""Names of languages and scripts in tasks and tables."""

import re

from babel import Locale, UnknownLocaleError
from babel.core import get_global

from gristmill.data_pipeline.signals.scripts import ALIASES

LANGUAGE_AND_SCRIPT = re.compile(r"bits_per_byte_(?P<language>.+)_(?P<script>[A-Z][a-z]{3})")
SCRIPT = re.compile("[A-Z][a-z]{3}")


def task_alias(task: str) -> str:
    """The name in tables: bits_per_byte_ar_Arab -> "bits_per_byte ar_Arab"."""
    return task.replace("bits_per_byte_", "bits_per_byte ", 1)


def likely_script(language: str) -> str | None:
    """The script in which a language is usually written (CLDR), by the names of signals/scripts.py: ko -> "Hang"."""
    found = get_global("likely_subtags").get(re.split("[_-]", language)[0])
    script = found.split("_")[1] if found is not None and found.count("_") == 2 else None
    return ALIASES.get(script, script) if script is not None else None


def english_name(tag: str) -> str:
    """ar_Arab -> "Arabic", pt_BR -> "Portuguese (Brazil)"; the tag itself where the language is not known."""
    parts = [part for part in re.split("[_-]", tag) if not SCRIPT.fullmatch(part)]
    for length in range(min(2, len(parts)), 0, -1):
        try:
            return str(Locale.parse("_".join(parts[:length])).get_display_name("en"))
        except (UnknownLocaleError, ValueError):
            continue
    return tag
