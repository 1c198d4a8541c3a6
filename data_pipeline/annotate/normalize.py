"""Unicode repair: what is done to every text before anything is measured, and a count of what it changed."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

import ftfy
from ftfy.badness import is_bad

from gristmill.foundation.config import Config


class NormalizeConfig(Config):
    """ftfy: `encoding` undoes mojibake and nothing that an author may have meant; `full` also straightens quotes,
    ligatures and HTML entities (what MT-NLG did; it changes code); `off` leaves all.

    control_characters: drops C0 and C1 controls but for tab and newline, U+FEFF and U+FFFE. line_ends: CR LF, CR,
    U+0085, U+2028 and U+2029 become LF. whitespace: `tidy` drops white space at line ends and the blank lines at
    both ends of a document and keeps at most two blank lines in a row; `keep` leaves all."""

    ftfy: Literal["encoding", "full", "off"] = "encoding"
    nfc: bool = True
    control_characters: bool = True
    line_ends: bool = True
    whitespace: Literal["tidy", "keep"] = "tidy"


@dataclass(frozen=True)
class Normalized:
    """changes: the names of the repairs that changed this text."""

    text: str
    changes: tuple[str, ...]


_ENCODING_ONLY = ftfy.TextFixerConfig(
    unescape_html=False,
    remove_terminal_escapes=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    fix_surrogates=True,
    remove_control_chars=False,
    normalization=None,
    explain=False,
)
_FULL = ftfy.TextFixerConfig(normalization=None, explain=False)
_LINE_ENDS = re.compile("\r\n|[\r\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe]")
_C1 = re.compile("[\x80-\x9f]")
# Begins where a run of blanks does and nowhere inside it: otherwise a run of n before a letter takes n * n / 2 steps.
_LINE_TAILS = re.compile(r"(?<![^\S\n])[^\S\n]++$", re.MULTILINE)
_BLANK_RUN = re.compile(r"\n{4,}")


def normalize(text: str, config: NormalizeConfig) -> Normalized:
    """The repaired text. Running it a second time changes nothing.

    "I\\x80\\x99m  \\r\\n" with mojibake becomes "I’m"; each repair that did something is named in `changes`."""
    steps = []
    if config.line_ends:
        steps.append(("line_ends", lambda t: _LINE_ENDS.sub("\n", t)))
    if config.ftfy != "off":
        steps.append(("ftfy", _fix_full if config.ftfy == "full" else _fix_encoding))
    if config.control_characters:
        steps.append(("control_characters", lambda t: _CONTROLS.sub("", t)))
    if config.nfc:
        steps.append(("nfc", _compose))
    if config.whitespace == "tidy":
        steps.append(("whitespace", _tidy))
    changes = []
    for name, step in steps:
        repaired = step(text)
        if repaired != text:
            changes.append(name)
            text = repaired
    return Normalized(text, tuple(changes))


def _fix_encoding(text: str) -> str:
    """As ftfy.fix_text, which mends every line by itself and takes 40 microseconds for an empty one: lines that hold
    nothing for it are not given to it, and nearly no text holds any others."""
    if not _may_be_mojibake(text):
        return text
    lines = text.split("\n")
    return "\n".join(ftfy.fix_text(line, _ENCODING_ONLY) if _may_be_mojibake(line) else line for line in lines)


def _may_be_mojibake(text: str) -> bool:
    return not text.isascii() and bool(is_bad(text) or _C1.search(text))


def _fix_full(text: str) -> str:
    return ftfy.fix_text(text, _FULL)


def _compose(text: str) -> str:
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def _tidy(text: str) -> str:
    return _BLANK_RUN.sub("\n\n\n", _LINE_TAILS.sub("", text)).strip("\n")
