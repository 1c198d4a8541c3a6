"""Readers of documents in markup of their own: Jupyter notebooks, Wikipedia dumps and Stack Exchange posts."""

import codecs
import io
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, BinaryIO

import orjson
from lxml import etree

from gristmill.data_pipeline.extraction.blocks import NotAPage, whole_text
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.whole_files import (
    BLANK_LINES,
    CODE,
    TICKS,
    Refused,
    code_lines,
    local_name,
    missing_extra,
)

# Jupyter notebooks.

_DATA_ADDRESS = re.compile(r"\bdata:[\w.+/-]{1,60};base64,[\w+/=%-]*")


def convert_notebook(content: bytes, source: SourceConfig) -> Iterator[Record]:
    """One record: Markdown cells as they are but for the data of images, code cells between fences; outputs are left
    out.

    Source: nbformat 4, and 3 with its worksheets."""
    notebook = orjson.loads(content.removeprefix(codecs.BOM_UTF8))
    if not isinstance(notebook, dict):
        raise Refused("bad_ipynb", "no notebook: its JSON is no object")
    if not isinstance(notebook.get("cells") or [], list):
        raise Refused("bad_ipynb", "no notebook: its cells are no list")
    cells = list(notebook.get("cells") or [])
    for sheet in notebook.get("worksheets") or ():
        cells += sheet.get("cells") or []
    if not all(isinstance(cell, dict) for cell in cells):
        raise Refused("bad_ipynb", "no notebook: a cell is no object")
    metadata = notebook.get("metadata") or {}
    known = (metadata.get("kernelspec") or {}).get("language") or (metadata.get("language_info") or {}).get("name")
    language = known if isinstance(known, str) else ""
    text = "\n\n".join(filter(None, (_cell(cell, language) for cell in cells)))
    if not text:
        raise Refused("no_text", "no cell with text")
    fields = {"programming_language": language} if language else {}
    yield Record(0, text, language=source.language or "", metadata=fields)


def _cell(cell: dict[str, Any], language: str) -> str:
    content = cell.get("source", cell.get("input", ""))
    lines = content if isinstance(content, list) else [content]
    if not all(isinstance(line, str) for line in lines):
        raise Refused("bad_ipynb", "no notebook: the source of a cell is no text")
    text = "".join(lines).strip("\n")
    if not text.strip() or cell.get("cell_type") == "raw":
        return ""
    if cell.get("cell_type") == "heading":
        return "#" * min(max(int(cell.get("level", 1)), 1), 6) + " " + " ".join(text.split())
    if cell.get("cell_type") != "code":
        return _DATA_ADDRESS.sub("", text)
    fence = "`" * max(3, 1 + max((len(run) for run in TICKS.findall(text)), default=0))
    return f"{fence}{cell.get('language', language)}\n{text}\n{fence}"


# XML dumps, read as a stream: an element is dropped once it was read.

_DISAMBIGUATION = re.compile(r"\{\{\s*(?:disambig|disambiguation|begriffsklärung|homonymie)\b", re.IGNORECASE)
_FILE_LINK = re.compile(r"(?:file|image|category|datei|bild|kategorie|fichier|catégorie|archivo|categoría)\s*:", re.I)
_LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,10}){0,2}:\S")  # to the article in another language
_MAGIC_WORD = re.compile(r"__[A-Z]{3,30}__")
BLOCK_TAGS = ("blockquote", "div", "p", "ul", "ol", "center", "poem", "dl", "h2", "h3", "h4")
_LIST_MARKS = re.compile(r"[*#:;]+")
_TAG_NAMES = re.compile(r"[^<>|]+")
DROPPED_TAGS = frozenset(
    ["ref", "references", "gallery", "timeline", "score", "graph", "imagemap", "templatedata", "rt", "rp"]
)
MAX_WIKI_DEPTH = 40
# Templates that stand in sentences, of Wikipedia in most languages, and the last of their arguments that is text.
_TEXT_TEMPLATES = {
    "lang": 2, "langx": 2, "transl": 3, "transliteration": 3, "nowrap": 1, "nobr": 1, "nobold": 1, "abbr": 1,
    "ill": 1, "interlanguage link": 1, "circa": 1, "c.": 1, "math": 1, "mvar": 1, "small": 1, "smaller": 1, "big": 1,
    "em": 1, "strong": 1, "sub": 1, "sup": 1, "smallcaps": 1, "sc": 1, "visible anchor": 1, "vanchor": 1,
    "not a typo": 1, "sic": 1, "quote": 1, "blockquote": 1, "cquote": 1, "quotation": 1, "zitat": 1, "tq": 1,
}  # fmt: skip
_SIGN_TEMPLATES = {
    "snd": " \u2013 ", "spaced ndash": " \u2013 ", "ndash": "\u2013", "en dash": "\u2013", "mdash": "\u2014",
    "em dash": "\u2014", "spaced en dash": " \u2013 ", "nbsp": " ", "'": "'", "!": "|", "pi": "\u03c0", "=": "=",
}  # fmt: skip
_BLOCK_TEMPLATES = ("quote", "blockquote", "cquote", "quotation", "zitat")
_BEFORE_TEXT = {"circa": "c. ", "c.": "c. "}
DROPPED = "\x02"  # in place of a template in a sentence
_ONLY_DROPPED = re.compile(r" ?\((?:[\s;,]*\x02)+[\s;,]*\)")
_DROPPED_FIRST = re.compile(r"\((?:[\s;,]*\x02)+[\s;,]*")
# The parser goes back where an opening has no end, in exponential time at worst. Steps of all its attempts: real
# articles take 2 to 3 a character of markup or run of text, and 10 to 45 with thirty openings without an end.
MAX_STEPS, MIN_STEPS = 20, 50_000  # for each of these, and for any page


class _TooManySteps(Exception):
    """The parser's steps on a page are over the limit."""


def read_mediawiki(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The articles of a dump (namespace 0, without redirects): their last revision's text without tables, references,
    categories, and templates but those of a sentence's words. Metadata: title, id, and time of the revision."""
    parse = _bounded_parser()
    for number, page in _elements(file, name, source, "page"):
        if isinstance(page, Unreadable):
            yield page
            continue
        fields = {local_name(element): element.text or "" for element in page.iter()}  # the last revision's remain
        if fields.get("ns", "0") != "0" or "redirect" in fields:
            continue
        wikitext = fields.get("text", "")
        if len(wikitext) > source.max_record_bytes:
            yield too_large(number, len(wikitext), source.max_record_bytes, -1, wikitext[:200])
            continue
        try:
            text = wiki_text(parse(wikitext), source.blocks.format == "markdown")
        except _TooManySteps as error:
            yield Unreadable(number, "bad_mediawiki", str(error), -1, excerpt(wikitext))
            continue
        except Exception as error:  # the parser raises many kinds for malformed markup
            yield Unreadable(number, "bad_mediawiki", f"its markup cannot be read ({first_line(error)})", -1, "")
            continue
        if text:
            fields["id"] = page.findtext("{*}id", "")  # those of revisions and persons follow it
            metadata = {key: fields[key] for key in ("title", "id", "timestamp") if fields.get(key)}
            if _DISAMBIGUATION.search(wikitext):
                metadata["disambiguation"] = True
            yield Record(number, text, language=source.language or "", metadata=metadata)


def _bounded_parser() -> Callable[[str], Any]:
    """mwparserfromhell.parse by its tokenizer in Python: it gives the tokens of that in C, and counts its steps."""
    try:
        from mwparserfromhell.parser.builder import Builder  # an optional extra
        from mwparserfromhell.parser.tokenizer import Tokenizer
    except ModuleNotFoundError:
        raise missing_extra("mediawiki", "mwparserfromhell") from None

    class BoundedTokenizer(Tokenizer):  # type: ignore[misc]
        steps = 0

        def _pop(self, keep_context: bool = False) -> Any:
            """The end of an attempt, with or without success."""
            _, _, _, (start, _) = self._stacks[-1]
            self.steps += max(self._head - start, 0)
            limit = MIN_STEPS + MAX_STEPS * len(self._text)
            if self.steps > limit:
                raise _TooManySteps(f"brackets, braces or tags without an end: over {limit} steps of the parser")
            return super()._pop(keep_context)

    return lambda wikitext: Builder().build(BoundedTokenizer().tokenize(wikitext))


def wiki_text(code: Any, markdown: bool, depth: int = 0) -> str:
    """The text of parsed wiki markup: headings and list items on lines of their own."""
    text = _DROPPED_FIRST.sub("(", _ONLY_DROPPED.sub("", _wiki_inline(code, markdown, depth))).replace(DROPPED, "")
    lines = []
    counts: dict[str, int] = {}  # of the items so far, by their marks
    for line in text.split("\n"):
        match = _LIST_MARKS.match(line)  # not in code, which begins with a mark
        marks = "" if match is None else match[0]
        counts = {outer: count for outer, count in counts.items() if marks.startswith(outer)}
        if marks:
            counts[marks] = counts.get(marks, 0) + 1
            marker = {"*": "- ", "#": f"{counts[marks]}. "}.get(marks[-1], "")
            indent = "".join("   " if markdown and mark == "#" else "  " for mark in marks[:-1])
            line = (indent + marker if marker else "") + line[len(marks) :].strip()
        lines.append(line.rstrip())
    return BLANK_LINES.sub("\n\n", "\n".join(lines)).strip().replace(CODE, "")


def _wiki_inline(code: Any, markdown: bool, depth: int) -> str:
    if depth > MAX_WIKI_DEPTH:
        return ""
    parts: list[str] = []
    for node in code.nodes:
        kind = type(node).__name__
        if kind == "Text":
            parts.append(_MAGIC_WORD.sub("", str(node.value)))
        elif kind == "Heading":
            title = _wiki_inline(node.title, markdown, depth + 1).strip()
            marks = f"{CODE}{'#' * node.level} " if markdown else ""  # as a line of code, it is no item
            parts.append(f"\n\n{marks}{title}\n\n")
        elif kind == "Wikilink":
            title = str(node.title).strip()
            if not (_FILE_LINK.match(title) or (_LANGUAGE_LINK.match(title) and node.text is None)):
                label = _wiki_inline(node.text or node.title, markdown, depth + 1)
                parts.append(label if node.text else label.removeprefix(":"))
        elif kind == "ExternalLink":
            if node.title is not None:
                parts.append(_wiki_inline(node.title, markdown, depth + 1))
            elif not node.brackets:
                parts.append(str(node.url))
        elif kind == "Template":
            parts.append(_wiki_template(node, markdown, depth + 1))
        elif kind == "HTMLEntity":
            parts.append(node.normalize())
        elif kind == "Tag":
            parts.append(_wiki_tag(node, markdown, depth + 1))
    return "".join(parts)


def _wiki_template(node: Any, markdown: bool, depth: int) -> str:
    """The words of a template that stands in a sentence; of others DROPPED."""
    name = str(node.name).strip().lower().replace("_", " ")
    if name in _SIGN_TEMPLATES:
        return _SIGN_TEMPLATES[name]
    if name in ("convert", "cvt") and node.has("1") and node.has("2"):
        return f"{node.get('1').value} {node.get('2').value}"
    most = 1 if name.startswith("lang-") else _TEXT_TEMPLATES.get(name, 0)
    arguments = [str(number) for number in range(1, most + 1) if node.has(str(number))]
    if most and node.has("text"):
        arguments = ["text"]
    if not arguments:
        return DROPPED
    text = _wiki_inline(node.get(arguments[-1]).value, markdown, depth).strip()
    return f"\n\n{text}\n\n" if name in _BLOCK_TEMPLATES else _BEFORE_TEXT.get(name, "") + text


def _wiki_list(node: Any, markdown: bool, depth: int) -> str:
    """The items of a list in HTML, as lines that are written as they are."""
    lines = []
    items = [item for item in node.contents.nodes if type(item).__name__ == "Tag" and str(item.tag).lower() == "li"]
    for number, item in enumerate(items, 1):
        marker = f"{number}. " if str(node.tag).lower() == "ol" else "- "
        text = "" if item.contents is None else _wiki_inline(item.contents, markdown, depth).strip()
        first, *others = (line.removeprefix(CODE) for line in BLANK_LINES.sub("\n", text).split("\n"))
        lines += [marker + first, *(" " * len(marker) + line for line in others)]
    return "\n\n" + "\n".join(CODE + line for line in lines) + "\n\n"


def _wiki_tag(node: Any, markdown: bool, depth: int) -> str:
    tag = str(node.tag).strip().lower()
    if tag in ("li", "dd", "dt") and node.wiki_markup:
        return str(node.wiki_markup)
    if tag in DROPPED_TAGS or tag == "table" or node.contents is None:
        return "\n" if tag == "br" else ""
    if tag == "math":
        return f"${node.contents}$"
    if tag in ("syntaxhighlight", "source", "pre") and not node.has("inline"):
        language = str(node.get("lang").value).strip() if node.has("lang") else ""
        return code_lines(str(node.contents), language, markdown)
    if tag in ("syntaxhighlight", "source", "pre", "nowiki", "code"):
        return str(node.contents)
    if tag in ("ul", "ol") and not node.wiki_markup:
        return _wiki_list(node, markdown, depth)
    text = _wiki_inline(node.contents, markdown, depth)
    if tag == "li":
        return f"\n{CODE}- {text.strip()}"
    return f"\n\n{text.strip()}\n\n" if tag in BLOCK_TAGS else text


POST_TYPES = {"1": "question", "2": "answer"}


def read_stack_exchange(file: BinaryIO, name: str, source: SourceConfig) -> Iterator[Record | Unreadable]:
    """The questions and answers of a Posts.xml; a question's title is its first paragraph. Metadata: post_type, id,
    parent_id, score, license, tags."""
    has_posts = False
    for number, row in _elements(file, name, source, "row"):
        if isinstance(row, Unreadable):
            yield row
            continue
        has_posts |= "PostTypeId" in row.attrib
        if not has_posts:
            reason = "a row without PostTypeId: name the files Posts.xml of the dump; the rest of this file is not read"
            yield Unreadable(number, "bad_stack_exchange", reason, -1, excerpt(etree.tostring(row)))
            return
        post_type, body = POST_TYPES.get(row.get("PostTypeId") or ""), row.get("Body") or ""
        if post_type is None or not body:
            continue
        title = f"<h1>{escape(row.get('Title') or '', quote=False)}</h1>" if row.get("Title") else ""
        try:
            text = whole_text((title + body).encode("utf-8", "replace"), source.blocks)
        except NotAPage as refused:
            yield Unreadable(number, refused.kind, str(refused), -1, excerpt(body))
            continue
        license_ = (row.get("ContentLicense") or "").replace(" ", "-")  # CC-BY-SA-4.0, as SPDX has it
        values = {"id": row.get("Id"), "parent_id": row.get("ParentId"), "score": row.get("Score"), "license": license_}
        metadata: dict[str, Any] = {"post_type": post_type} | {key: value for key, value in values.items() if value}
        if tags := _TAG_NAMES.findall(row.get("Tags") or ""):
            metadata["tags"] = tags
        if text:
            yield Record(number, text, language=source.language or "", metadata=metadata)


class _Stream(io.RawIOBase):
    """The decompressed file for lxml, which reads from a file object. size: bytes that were read since `reset`."""

    def __init__(self, pieces: Iterator[bytes]):
        super().__init__()
        self._pieces, self._rest, self.size = pieces, b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = next(self._pieces, b"")
        limit = len(self._rest) if size < 0 else size
        taken, self._rest = self._rest[:limit], self._rest[limit:]
        self.size += len(taken)
        return taken


def _elements(
    file: BinaryIO, name: str, source: SourceConfig, tag: str
) -> Iterator[tuple[int, etree._Element | Unreadable]]:
    """(number, element) of the elements of that name, one at a time in memory; one Unreadable for a damaged rest."""
    number = 0
    stream = _Stream(blocks(file, name))
    try:
        events = etree.iterparse(
            stream, events=("end",), tag=f"{{*}}{tag}", resolve_entities=False, no_network=True, load_dtd=False
        )
        for _, element in events:
            yield number, element
            number += 1
            element.clear()
            while (before := element.getprevious()) is not None:
                element.getparent().remove(before)
    except Damaged as damage:
        yield number, Unreadable(number, damage.kind, str(damage))
    except etree.XMLSyntaxError as error:
        reason = f"no XML from here on ({first_line(error)}); the elements before it were read"
        yield number, Unreadable(number, f"bad_{source.format}", reason)
