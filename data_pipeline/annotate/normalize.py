"""Unicode normalization and repair of every text before its signals are measured.

A compiled scan finds which texts a step may change; only those become Python strings. Line ends and white space are
compiled too."""

import unicodedata
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from gristmill.data_pipeline.annotate.scan_tables import BAD, CONTROL, CONTROLS, LINE_END, UNCOMPOSED
from gristmill.data_pipeline.annotate.text_scan import scan_texts, tidied, with_newlines
from gristmill.data_pipeline.signals.buffer import TextBuffer, joined
from gristmill.foundation.config import Config

# The repairs, in their order; repair k is bit k of the changes of a text.
REPAIRS = ("line_ends", "ftfy", "control_characters", "nfc", "whitespace")
LINE_ENDS, FTFY, CONTROL_CHARACTERS, NFC, WHITESPACE = (1 << place for place in range(len(REPAIRS)))
EVERYTHING = BAD | CONTROL | UNCOMPOSED


class NormalizeConfig(Config):
    """ftfy: `encoding` fixes mojibake only, nothing that an author may have intended; `full` also straightens quotes,
    ligatures and HTML entities (what MT-NLG did; it changes code); `off` changes nothing.

    control_characters: drops C0 and C1 controls except tab and newline, U+FEFF and U+FFFE. line_ends: CR LF, CR,
    U+0085, U+2028 and U+2029 become LF. whitespace: `tidy` drops white space at line ends and blank lines at
    both ends of a document and keeps at most two blank lines in a row; `keep` changes nothing."""

    ftfy: Literal["encoding", "full", "off"] = "encoding"
    nfc: bool = True
    control_characters: bool = True
    line_ends: bool = True
    whitespace: Literal["tidy", "keep"] = "tidy"


def normalize_texts(texts: TextBuffer, config: NormalizeConfig) -> tuple[TextBuffer, np.ndarray]:
    """Return (repaired texts, uint8[N]: the bits of the REPAIRS that changed each text). The function is idempotent.

    "I\\x80\\x99m  \\r\\n" with mojibake becomes "I’m"; its repairs are line_ends, ftfy and whitespace."""
    changes = np.zeros(len(texts), np.uint8)
    found = scan_texts(texts)
    if config.line_ends and np.any(found & LINE_END):
        changes[found & LINE_END > 0] = LINE_ENDS
        texts = with_newlines(texts)
        found = scan_texts(texts)
    if config.ftfy == "full":
        found[:] = EVERYTHING
    steps = _flag_of_steps(config)
    repaired: dict[int, bytes] = {}
    for k in np.flatnonzero(found & steps).tolist():
        text = texts.raw(k).decode()
        better, bits = _repaired(text, config, int(found[k]))
        if bits:
            changes[k] |= bits
            repaired[k] = better.encode()
    if repaired:
        texts = TextBuffer(*joined([repaired[k] if k in repaired else texts.raw(k) for k in range(len(texts))]))
    if config.whitespace == "tidy":
        tidy = tidied(texts)
        changes[np.diff(tidy.offsets) != np.diff(texts.offsets)] |= WHITESPACE
        texts = tidy
    return texts, changes


def _flag_of_steps(config: NormalizeConfig) -> int:
    """What a scan must find so that a step beside line ends and white space may change a text."""
    return (
        (BAD if config.ftfy != "off" else 0)
        | (CONTROL if config.control_characters else 0)
        | (UNCOMPOSED if config.nfc else 0)
    )


def _repaired(text: str, config: NormalizeConfig, found: int) -> tuple[str, int]:
    """The text after ftfy, control characters and NFC, and the bits of those that changed it. found: what the scan
    found in it; a step that could change nothing is skipped."""
    bits = 0
    if found & BAD and config.ftfy != "off":
        better = _fixed_lines(text) if config.ftfy == "encoding" else _ftfy(text, config.ftfy)
        bits, text = bits | (FTFY if better != text else 0), better
    if config.control_characters and (found & CONTROL or bits):
        better = CONTROLS.sub("", text)
        bits, text = bits | (CONTROL_CHARACTERS if better != text else 0), better
    # what is removed or replaced may have stood between two characters that compose
    if config.nfc and (found & UNCOMPOSED or bits) and not unicodedata.is_normalized("NFC", text):
        bits, text = bits | NFC, unicodedata.normalize("NFC", text)
    return text, bits


def _fixed_lines(text: str) -> str:
    """Apply ftfy.fix_text to the lines that may hold mojibake: it takes 40 microseconds even for an empty line."""
    lines = text.split("\n")
    bad = scan_texts(TextBuffer(*joined([line.encode() for line in lines]))) & BAD
    for k in np.flatnonzero(bad).tolist():
        lines[k] = _ftfy(lines[k], "encoding")
    return "\n".join(lines)


def _ftfy(text: str, extent: str) -> str:
    import ftfy  # loaded here: few texts need it, and its import takes a tenth of a second

    return ftfy.fix_text(text, _ftfy_config(extent))


@lru_cache(maxsize=2)
def _ftfy_config(extent: str) -> Any:
    import ftfy  # as above

    if extent == "full":
        return ftfy.TextFixerConfig(normalization=None, explain=False)
    return ftfy.TextFixerConfig(
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
