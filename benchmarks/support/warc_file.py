"""A WARC file like Common Crawl's made of pages: one gzip member a record, a request and a response each."""

import gzip
import uuid
from collections.abc import Iterable
from pathlib import Path


def write_warc(path: Path, pages: Iterable[tuple[str, bytes]]) -> None:
    """pages: (address, HTML)."""
    with path.open("wb") as file:
        for address, html in pages:
            file.write(
                _record("request", address, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", _name("request", address))
            )
            file.write(page_record(address, html, _name("response", address)))


def page_record(address: str, html: bytes, record_id: str) -> bytes:
    """A response record as a gzip member of its own, as Common Crawl writes them (WARC 1.0, ISO 28500)."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(html)}\r\n\r\n".encode()
    return _record("response", address, head + html, record_id)


def _name(kind: str, address: str) -> str:
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{kind} {address}')}>"


def _record(kind: str, address: str, content: bytes, record_id: str) -> bytes:
    fields = {
        "WARC-Type": kind,
        "WARC-Record-ID": record_id,
        "WARC-Date": "2024-01-01T00:00:00Z",
        "WARC-Target-URI": address,
        "Content-Type": f"application/http; msgtype={kind}",
        "Content-Length": str(len(content)),
    }
    if kind == "response":
        fields["WARC-Identified-Payload-Type"] = "text/html"
    lines = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    return gzip.compress(f"WARC/1.0\r\n{lines}\r\n".encode() + content + b"\r\n\r\n", mtime=0)
