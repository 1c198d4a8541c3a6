"""Matching of URLs against a list of blocked hosts and URL prefixes.

An entry without a slash is a host: it blocks the host and every host below it (`example.com` blocks `www.example.com`,
not `badexample.com`). An entry with a slash is a URL prefix (`example.com/forum/` blocks everything below that
folder, on that host only). The scheme, `user@`, the port and the case of the host are ignored."""

from collections.abc import Iterable

from gristmill.data_pipeline.readers.urls import split_url


class BlockedUrls:
    def __init__(self, entries: Iterable[str]):
        self._hosts: set[str] = set()
        self._prefixes: dict[str, list[str]] = {}
        for entry in entries:
            host, path = split_url(entry)
            if path:
                self._prefixes.setdefault(host, []).append(path)
            else:
                self._hosts.add(host)

    def blocks(self, url: str) -> bool:
        """Whether the URL is on the list; False for an empty URL."""
        host, path = split_url(url)
        if not host:
            return False
        if any(path.startswith(prefix) for prefix in self._prefixes.get(host, ())):
            return True
        labels = host.split(".")
        return any(".".join(labels[first:]) in self._hosts for first in range(len(labels)))
