"""Parts of URLs."""


def split_url(url: str) -> tuple[str, str]:
    """(host in lower case, path from its slash). "HTTPS://me@A.b:80/C?d" -> ("a.b", "/C?d"); "a.b" -> ("a.b", "")."""
    rest = url.strip().partition("://")[2] if "://" in url else url.strip()
    ends = [at for mark in "/?#" if (at := rest.find(mark)) >= 0]
    end = min(ends, default=len(rest))
    host = rest[:end].rpartition("@")[2].partition(":")[0].rstrip(".").lower()
    return host, rest[end:]
