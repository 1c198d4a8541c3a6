"""Detection of binary files by their signatures, such as a picture in a folder that is read as JSONL."""

from gristmill.data_pipeline.readers.files import open_raw
from gristmill.foundation.addresses import is_address
from gristmill.foundation.errors import InputError

# File signatures, from the formats' own documents (PNG: W3C; JPEG: ITU-T T.81; ZIP: PKWARE APPNOTE; ...).
SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"II*\x00", "a TIFF picture"),
    (0, b"MM\x00*", "a TIFF picture"),
    (0, b"RIFF", "a RIFF file (WebP, WAV or AVI)"),
    (0, b"OggS", "an Ogg file"),
    (0, b"ID3", "an MP3 file"),
    (4, b"ftyp", "an MP4 or HEIC file"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"PK\x03\x04", "a ZIP archive (or an Office document)"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"PAR1", "a Parquet file"),
)
LOOKED_AT_BYTES = 16
PARQUET = "a Parquet file"
SUFFIXES = {"text": "txt", "markdown": "md"}  # where the suffix is not the format's name


def foreign_kind(head: bytes, format_: str) -> str | None:
    """The kind of a binary file by its first bytes; None if the format can read it or the signature is unknown."""
    for offset, signature, kind in SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return None if (kind == PARQUET and format_ == "parquet") else kind
    return None


def check_kinds(source: str, format_: str, locations: list[str]) -> None:
    """Raises InputError that names the first local file of another kind and the number of such files."""
    found = []
    for location in locations:
        if not is_address(location):
            with open_raw(location) as file:
                kind = foreign_kind(file.read(LOOKED_AT_BYTES), format_)
            if kind is not None:
                found.append((location, kind))
    if found:
        location, kind = found[0]
        others = f" (and {len(found) - 1} files more are of such kinds)" if len(found) > 1 else ""
        raise InputError(
            f"source {source}: {location} is {kind}, which format {format_} does not read{others}; name the files by a "
            f"glob such as **/*.{SUFFIXES.get(format_, format_)}, or move it away"
        )
