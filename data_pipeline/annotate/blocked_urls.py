"""Whether an address is on a list of blocked hosts and addresses.

An entry without a slash is a host: it blocks the host and every host below it (`example.com` blocks `www.example.com`,
not `badexample.com`). An entry with one is the begin of an address (`example.com/forum/` blocks what stands below that
folder, on that host alone). The scheme, `user@`, the port and upper or lower case of the host do not count."""

from collections.abc import Iterable


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
        """False for no address at all: a document without one cannot be blocked by it."""
        host, path = split_url(url)
        if not host:
            return False
        if any(path.startswith(prefix) for prefix in self._prefixes.get(host, ())):
            return True
        labels = host.split(".")
        return any(".".join(labels[first:]) in self._hosts for first in range(len(labels)))


def split_url(url: str) -> tuple[str, str]:
    """(host in lower case, path from its slash). "HTTPS://me@A.b:80/C?d" -> ("a.b", "/C?d"); "a.b" -> ("a.b", "")."""
    rest = url.strip().partition("://")[2] if "://" in url else url.strip()
    ends = [at for mark in "/?#" if (at := rest.find(mark)) >= 0]
    end = min(ends, default=len(rest))
    host = rest[:end].rpartition("@")[2].partition(":")[0].rstrip(".").lower()
    return host, rest[end:]
