"""Raw files whose content is one document, bounded by max_record_bytes, and the limits of ZIP packages."""

import io
import zipfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from lxml import etree

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable, excerpt, first_line, too_large
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import RecipeError

MAX_MEMBERS = 20_000  # of a package
MAX_EXPANSION = 8  # bytes of a package's content for a byte of max_record_bytes: images are not unpacked


class Refused(Exception):
    """The content is not a document of its format, or one over a limit. kind: the reason it is counted under."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


Convert = Callable[[bytes, SourceConfig], Iterator[Record]]


def read_whole(file: BinaryIO, name: str, source: SourceConfig, convert: Convert) -> Iterator[Record | Unreadable]:
    """The documents that convert makes of the file's content. Any failure of convert is one Unreadable."""
    content, num_bytes = bytearray(), 0
    try:
        for block in blocks(file, name):
            num_bytes += len(block)
            if num_bytes <= source.max_record_bytes:
                content += block
    except Damaged as damage:
        yield Unreadable(0, damage.kind, str(damage))
        return
    if num_bytes > source.max_record_bytes:
        yield too_large(0, num_bytes, source.max_record_bytes, 0, bytes(content[:200]))
        return
    try:
        yield from convert(bytes(content), source)
    except Refused as refused:
        yield Unreadable(0, refused.kind, str(refused), -1, excerpt(bytes(content[:200])))
    except (RecipeError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many kinds for malformed documents
        reason = f"damaged {source.format} document ({type(error).__name__}: {first_line(error)})"
        yield Unreadable(0, f"bad_{source.format}", reason, -1, excerpt(bytes(content[:200])))


def missing_extra(format_: str, package: str) -> RecipeError:
    return RecipeError(f"format {format_} needs the package {package}: pip install 'gristmill[documents]'")


def open_package(content: bytes, source: SourceConfig) -> zipfile.ZipFile:
    """The ZIP package. Raises Refused if it is none, or if what it unpacks to is over the limits."""
    try:
        package = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile as error:
        raise Refused(f"bad_{source.format}", f"not a ZIP package ({first_line(error)})") from None
    members = package.infolist()
    unpacked = sum(member.file_size for member in members if member.filename.endswith((".xml", "html", ".htm", ".opf")))
    if len(members) > MAX_MEMBERS or unpacked > MAX_EXPANSION * source.max_record_bytes:
        raise Refused(
            "package_too_large",
            f"{len(members)} members of {unpacked} bytes of markup; the limits are {MAX_MEMBERS} and {MAX_EXPANSION} "
            "times max_record_bytes; raise max_record_bytes of the source to read it",
        )
    return package


def member(package: zipfile.ZipFile, name: str) -> bytes:
    """The content of a member, of at most the size that the package's directory gives."""
    size = package.getinfo(name).file_size
    with package.open(name) as stream:
        return stream.read(size)


def parse_xml(content: bytes) -> etree._Element:
    """The root element, without external entities and network access. Raises XMLSyntaxError."""
    return etree.fromstring(content, etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False))


def local_name(element: etree._Element) -> str:
    """The name without its namespace; "" for comments and processing instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
