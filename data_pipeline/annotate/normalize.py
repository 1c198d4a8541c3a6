"""Unicode normalization and repair of every text before its signals are measured.

A compiled scan finds which texts a step may change; only those become Python strings. Line ends and white space are
compiled too."""

import unicodedata
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gristmill.data_pipeline.annotate.scan_tables import (
    BAD,
    CONTROL,
    CONTROLS,
    INSIDE,
    LINE_END,
    START,
    UNCOMPOSED,
    ScanTables,
    build_tables,
)
from gristmill.data_pipeline.signals.bits import (
    BLOCK,
    PADDING,
    ZERO,
    TextBuffer,
    below,
    decode,
    find_newline,
    first_bit,
    joined,
    strip_end,
)
from gristmill.data_pipeline.signals.characters import SPACE, character_table
from gristmill.data_pipeline.signals.intrinsics import bytes_within, load64, pointer, store64
from gristmill.foundation.config import Config
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

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
    scan_flags = scan_texts(texts)
    if config.line_ends and np.any(scan_flags & LINE_END):
        changes[scan_flags & LINE_END > 0] = LINE_ENDS
        texts = with_newlines(texts)
        scan_flags = scan_texts(texts)
    if config.ftfy == "full":
        scan_flags[:] = EVERYTHING
    steps = _flag_of_steps(config)
    repaired: dict[int, bytes] = {}
    for k in np.flatnonzero(scan_flags & steps).tolist():
        text = texts.raw(k).decode()
        better, bits = _repaired(text, config, int(scan_flags[k]))
        if bits:
            changes[k] |= bits
            repaired[k] = better.encode()
    if repaired:
        texts = TextBuffer(*joined([repaired[k] if k in repaired else texts.raw(k) for k in range(len(texts))]))
    if config.whitespace == "tidy":
        tidy = strip_blank_space(texts)
        changes[np.diff(tidy.offsets) != np.diff(texts.offsets)] |= WHITESPACE
        texts = tidy
    return texts, changes


def _flag_of_steps(config: NormalizeConfig) -> int:
    """Flag that a scan must find so that a step beside line ends and white space may change a text."""
    return (
        (BAD if config.ftfy != "off" else 0)
        | (CONTROL if config.control_characters else 0)
        | (UNCOMPOSED if config.nfc else 0)
    )


def _repaired(text: str, config: NormalizeConfig, scan_flag: int) -> tuple[str, int]:
    """The text after ftfy, control characters and NFC, and the bits of those that changed it. found: what the scan
    found in it; a step that could change nothing is skipped."""
    bits = 0
    if scan_flag & BAD and config.ftfy != "off":
        better = _fixed_lines(text) if config.ftfy == "encoding" else _ftfy(text, config.ftfy)
        bits, text = bits | (FTFY if better != text else 0), better
    if config.control_characters and (scan_flag & CONTROL or bits):
        better = CONTROLS.sub("", text)
        bits, text = bits | (CONTROL_CHARACTERS if better != text else 0), better
    # what is removed or replaced may have stood between two characters that compose
    if config.nfc and (scan_flag & UNCOMPOSED or bits) and not unicodedata.is_normalized("NFC", text):
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


# Compiled passes over a buffer of texts: what normalization would change, line ends and white space.

MAX_BLANK_LINES = 2


class CharacterTables(NamedTuple):
    """ScanTables as the kernel reads them. ascii_classes: uint8[128]. matched: the automaton's final state."""

    page_of: np.ndarray
    pages: np.ndarray
    classes: np.ndarray
    combining: np.ndarray
    flags: np.ndarray
    next_state: np.ndarray
    ascii_classes: np.ndarray
    memory: int
    matched: int


def scan_texts(texts: TextBuffer) -> np.ndarray:
    """uint8[N]: LINE_END, CONTROL, BAD, UNCOMPOSED of every text. A text without BAD is one of which ftfy's is_bad is
    false and that has no C1 control; one without UNCOMPOSED is in NFC."""
    scan_flags = np.zeros(len(texts), np.uint8)
    _scan_texts(texts.text, texts.offsets, _character_tables(), scan_flags)
    return scan_flags


def with_newlines(texts: TextBuffer) -> TextBuffer:
    """The texts with LF for CR LF, CR, U+0085, U+2028 and U+2029."""
    out, offsets = np.empty(len(texts.text), np.uint8), np.zeros(len(texts) + 1, np.int64)
    _replace_line_ends(texts.text, texts.offsets, out, offsets)
    return TextBuffer(out[: offsets[-1] + PADDING], offsets)


def strip_blank_space(texts: TextBuffer) -> TextBuffer:
    """The texts without white space at line ends, without blank lines at both ends, and with at most MAX_BLANK_LINES
    blank lines in a row."""
    out, offsets = np.empty(len(texts.text) + BLOCK, np.uint8), np.zeros(len(texts) + 1, np.int64)
    _tidy(texts.text, texts.offsets, character_table(), out, offsets)
    return TextBuffer(out[: offsets[-1] + PADDING], offsets)


def _character_tables() -> CharacterTables:
    tables = scan_tables()
    ascii_classes = tables.classes[tables.pages[tables.page_of[0], :128]]
    return CharacterTables._make([*tables[:-1], ascii_classes, tables.memory, len(tables.next_state) - 1])


TABLES_PATH = Path(__file__).with_name("scan_tables.npz")


@lru_cache(maxsize=1)
def scan_tables() -> ScanTables:
    """The shipped tables if they were made from the installed versions, else new ones."""
    with np.load(TABLES_PATH, allow_pickle=False) as file:
        if str(file["versions"]) == installed_versions():
            return ScanTables._make([*(file[name] for name in ScanTables._fields[:-1]), int(file["memory"])])
    return build_tables()


def installed_versions() -> str:
    return f"ftfy {version('ftfy')}, Unicode {unicodedata.unidata_version}"


@cached_njit(nogil=True)
def _scan_texts(text_array, offsets, tables, scan_flags):
    text = pointer(text_array, 0)
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1] - 1
        controls, returns, beyond = ZERO, ZERO, ZERO
        for base in range(start, end, BLOCK):
            inside = below(end - base)
            low = bytes_within(text, base, 0x00, 0x09) | bytes_within(text, base, 0x0B, 0x15)
            controls |= (low | bytes_within(text, base, 0x7F, 1)) & inside
            returns |= bytes_within(text, base, 0x0D, 1) & inside
            beyond |= bytes_within(text, base, 0x80, 0x80) & inside
        flags = (CONTROL if controls != ZERO else 0) | (LINE_END if returns != ZERO else 0)
        scan_flags[k] = flags | (_scan_text(text, start, end, tables) if beyond != ZERO else 0)


@cached_njit(nogil=True)
def _scan_text(text, start, end, tables):
    """The flags of one text's characters beyond ASCII, and BAD if the automaton matches.

    The automaton forgets: of a run of ASCII only the characters near others are read."""
    state, last_combining, flags = np.int64(START), np.int64(0), np.int64(0)
    at = start
    while at < end:
        if text[at] < 0x80:
            last_combining = np.int64(0)
            stop = _ascii_end(text, at, end)
            if stop - at > 2 * tables.memory:
                state = _ascii_state(text, at, at + tables.memory, state, tables)
                if state == tables.matched:
                    return _all_flags(text, at, end, flags | BAD, tables)
                at, state = stop - tables.memory, np.int64(INSIDE)
            state = _ascii_state(text, at, stop, state, tables)
            if state == tables.matched:
                return _all_flags(text, at, end, flags | BAD, tables)
            at = stop
            continue
        code, size = decode(text, at)
        kind = tables.pages[tables.page_of[code >> 8], code & 0xFF]
        combining = np.int64(tables.combining[kind])
        flags |= tables.flags[kind]
        if combining != 0 and combining < last_combining:
            flags |= UNCOMPOSED
        last_combining = combining
        if at > start and text[at - 1] == 0x0A:  # ftfy looks at each line by itself, so a start of a text is one
            state = np.int64(START)
        state = np.int64(tables.next_state[state, tables.classes[kind]])
        if state == tables.matched:
            return _all_flags(text, at, end, flags | BAD, tables)
        at += size
    return flags


@cached_njit(nogil=True)
def _all_flags(text, at, end, flags, tables):
    """flags with those of the rest of a text that is bad, where order and composition are checked in any case."""
    while at < end:
        code, size = decode(text, at)
        flags |= tables.flags[tables.pages[tables.page_of[code >> 8], code & 0xFF]]
        at += size
    return flags | UNCOMPOSED


@cached_njit(nogil=True)
def _ascii_state(text, at, stop, state, tables):
    while at < stop and state != tables.matched:
        state = np.int64(tables.next_state[state, tables.ascii_classes[text[at]]])
        at += 1
    return state


@cached_njit(nogil=True, forceinline=True)
def _ascii_end(text, at, end):
    """The place of the first byte beyond ASCII; end if there is none."""
    while at < end:
        beyond = bytes_within(text, at, 0x80, 0x80)
        if beyond != ZERO:
            return min(at + first_bit(beyond), end)
        at += BLOCK
    return end


@cached_njit(nogil=True)
def _replace_line_ends(text, offsets, out, out_offsets):
    put = 0
    for k in range(len(offsets) - 1):
        at, end = offsets[k], offsets[k + 1] - 1
        while at < end:
            byte, size = text[at], _line_end_bytes(text, at, end)
            out[put] = 0x0A if size else byte
            put += 1
            at += max(size, 1)
        out[put] = 0x0A
        put += 1
        out_offsets[k + 1] = put


@cached_njit(nogil=True, forceinline=True)
def _line_end_bytes(text, at, end):
    """How many bytes the line end at `at` has that is not LF; 0 if there is none."""
    byte = text[at]
    if byte == 0x0D:
        return 2 if at + 1 < end and text[at + 1] == 0x0A else 1
    if byte == 0xC2:
        return 2 if text[at + 1] == 0x85 else 0
    if byte == 0xE2:
        return 3 if text[at + 1] == 0x80 and (text[at + 2] == 0xA8 or text[at + 2] == 0xA9) else 0
    return 0


@cached_njit(nogil=True)
def _tidy(text_array, offsets, flag_array, out_array, out_offsets):
    text, flags, out = pointer(text_array, 0), pointer(flag_array, 0), pointer(out_array, 0)
    put = np.int64(0)
    for k in range(len(offsets) - 1):
        at, end = offsets[k], offsets[k + 1] - 1
        first, newlines = put, 0  # newlines: line ends that are written before the next line with text
        while at < end:
            stop = find_newline(text, at, end)
            line_end = strip_end(text, at, stop, flags, SPACE)
            if line_end > at:
                for _ in range(min(newlines, MAX_BLANK_LINES + 1) if put > first else 0):
                    out[put] = 0x0A
                    put += 1
                newlines = 0
                put = _copy(text, at, line_end, out, put)
            newlines += 1
            at = stop + 1
        out[put] = 0x0A
        put += 1
        out_offsets[k + 1] = put


@cached_njit(nogil=True, forceinline=True)
def _copy(text, at, end, out, put):
    """Copies text[at:end] to out[put:] and returns where it ends there. Writes up to seven bytes behind it."""
    done = at
    while done < end:
        store64(out, put + done - at, load64(text, done))
        done += 8
    return put + end - at
