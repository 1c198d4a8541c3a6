"""Files behind fsspec addresses (`s3://`, `gs://`, `hf://`, `https://`, `memory://`), read only.

Access is by the libraries' own mechanisms (environment variables, configuration files, roles), never by the recipe: a
recipe and its manifest are published."""

import glob
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from gristmill.foundation.deferred_module import DeferredModule

fsspec = DeferredModule("fsspec")  # 0.1 s, for addresses alone
aiohttp = DeferredModule("aiohttp")

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 2
# Words of a parameter's name that say its value is a secret, and words that do before `key`.
_SECRET_WORDS = frozenset(
    (
        "token", "secret", "password", "passwd", "passphrase", "pwd", "pass", "signature", "sig", "credential",
        "credentials", "auth", "authorization", "apikey", "accesskey", "session", "sessionid", "sas", "jwt",
    )
)  # fmt: skip
_BEFORE_KEY = frozenset(["api", "access", "secret", "account", "private", "auth"])
_PARAMETER = re.compile(r"[?&#;]([^=&#;?]+)=")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def is_address(location: str) -> bool:
    """True for `s3://bucket/key` and its like, False for a path of this machine, `file:///path` too."""
    return "://" in location and not location.startswith("file:")


def without_credentials(address: str) -> str:
    """The address itself. Raises ValueError, which does not repeat them, if a link of it holds credentials: before the
    host (`https://user:SECRET@host`), or as a parameter of the query or the fragment (`?api_key=SECRET`).

    A chained address (`simplecache::https://host/file`, `zip://member::s3://bucket/key`) is looked at link by link; an
    address inside a parameter is looked at too."""
    links = address.split("::")
    for number, link in enumerate(links):
        scheme, separator, rest = link.partition("://")
        if not separator:
            if not (number == 0 and link.startswith("//")):
                continue
            scheme, rest = "", link[2:]
        if number + 1 < len(links) and "://" not in links[number + 1] and "@" in links[number + 1]:
            raise _refusal(scheme, "", "a user before its host")  # https://user::SECRET@host
        host = re.split("[/?#]", rest, maxsplit=1)[0]
        user = host.rpartition("@")[0]
        port = re.sub(r"^\[.*\]", "", host.rpartition("@")[2]).partition(":")[2]
        if (user and (scheme != "hf" or ":" in user)) or (port and not port.isdigit() and "@" in rest):
            bare_host = host.rpartition("@")[2].partition(":")[0] if user else ""
            raise _refusal(scheme, bare_host, "a user before its host")
        for name, value in _parameters(rest):
            if _is_secret(name):
                raise _refusal(scheme, host, f"the parameter {name!r}")
            without_credentials(value)
    return address


def _refusal(scheme: str, host: str, what: str) -> ValueError:
    return ValueError(
        f"the address {scheme}://...{host} holds credentials ({what}), and recipes are published in manifests; remove "
        "them and give access by the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, HF_TOKEN, "
        "GOOGLE_APPLICATION_CREDENTIALS) or a role"
    )


def _parameters(rest: str) -> Iterator[tuple[str, str]]:
    """(name, value) of the query and the fragment, with percent signs decoded until nothing changes."""
    for match in _PARAMETER.finditer(rest):
        name, value = match[1], re.split("[&#;]", rest[match.end() :], maxsplit=1)[0]
        for _ in range(4):
            name, value = unquote(name), unquote(value)
        yield name, value


def _is_secret(name: str) -> bool:
    """Whether a word of the name says so: api_key, accessToken, X-Amz-Signature; not tokenizer, max_tokens, author."""
    words = [word.lower() for word in _WORD.findall(name)]
    if words == ["key"] or any(word in _SECRET_WORDS for word in words):
        return True
    return any(word == "key" and before in _BEFORE_KEY for before, word in pairwise(words))


def open_address(location: str) -> io.RawIOBase:
    """The file for reading, with random access where the store has it. Raises OSError or ImportError."""
    with as_os_errors():
        filesystem, path = filesystem_of(location)
        return RemoteFile(filesystem.open(path, "rb"))


def address_size(location: str) -> int:
    """Bytes of the stored file. Raises OSError or ImportError."""
    with as_os_errors():
        filesystem, path = filesystem_of(location)
        return int(filesystem.size(path))


def matching_addresses(pattern: str) -> list[str]:
    """Every file that the glob matches or that is below the folder. Raises OSError or ImportError."""
    with as_os_errors():
        filesystem, path = filesystem_of(pattern)
        protocol = pattern.split("://")[0]
        if glob.has_magic(path):
            matches = [match for match in filesystem.glob(path) if filesystem.isfile(match)]
        else:
            matches = filesystem.find(path) if filesystem.isdir(path) else [path] if filesystem.exists(path) else []
    return [match if is_address(match) else f"{protocol}://{match.lstrip('/')}" for match in matches]


class RemoteFile(io.RawIOBase):
    """A file of fsspec whose errors are all OSErrors: those of a store's own library often are not."""

    def __init__(self, file: Any):
        super().__init__()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with as_os_errors():
            return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with as_os_errors():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Every error but an import's becomes an OSError with the same message."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:  # botocore, aiohttp and others have classes of their own
        raise OSError(f"{type(error).__name__}: {error}") from error


def filesystem_of(location: str) -> tuple[Any, str]:
    """The fsspec file system of the address, with time limits, and the path in it."""
    protocol = location.split("://")[0]
    configured = fsspec.config.conf.get(protocol, {})
    options = {name: value for name, value in _limits(protocol).items() if name not in configured}
    return fsspec.core.url_to_fs(location, **options)


def _limits(protocol: str) -> dict[str, Any]:
    """Time limits, so that an address without an answer is an error in half a minute: botocore by itself waits 60 s
    five times."""
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        return {"config_kwargs": {**limits, "retries": {"total_max_attempts": ATTEMPTS, "mode": "standard"}}}
    if protocol in ("http", "https"):
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        return {"client_kwargs": {"timeout": timeout}}
    return {}
