"""Files behind fsspec addresses (`s3://`, `gs://`, `hf://`, `https://`, `memory://`), read only.

Access is by the libraries' own mechanisms (environment variables, configuration files, roles), never by the recipe: a
recipe and its manifest are published."""

import glob
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from gristmill.foundation.deferred_module import DeferredModule

fsspec = DeferredModule("fsspec")  # 0.1 s, for addresses alone
aiohttp = DeferredModule("aiohttp")

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 2
# Names of parameters whose values are secrets: by a part of the name (`x-amz-signature`, `accessToken`), or all of it.
_SECRET_PART = re.compile(
    "token|secret|passw|pwd|signature|credential|api[-_.]?key|access[-_.]?key|account[-_.]?key|auth|session", re.I
)
_SECRET_NAMES = frozenset(["key", "pass", "sas", "sig", "jwt"])
_PARAMETER = re.compile(r"[?&#;]([^=&#;?]+)=")


def is_address(location: str) -> bool:
    """True for `s3://bucket/key` and its like, False for a path of this machine, `file:///path` too."""
    return "://" in location and not location.startswith("file:")


def without_credentials(address: str) -> str:
    """The address itself. Raises ValueError, which does not repeat them, if a link of it holds credentials: before the
    host (`https://user:SECRET@host`), or as a parameter of the query or the fragment (`?api_key=SECRET`).

    A chained address (`simplecache::https://host/file`, `zip://member::s3://bucket/key`) is looked at link by link."""
    for link in address.split("::"):
        scheme, separator, rest = link.partition("://")
        if not separator:
            continue
        host = re.split("[/?#]", rest, maxsplit=1)[0]
        parameters = [unquote(name) for name in _PARAMETER.findall(rest)]
        secret = next((name for name in parameters if _is_secret(name)), None)
        if secret is None and ("@" not in host or scheme == "hf"):
            continue
        host = host.rpartition("@")[2]
        part = f"the parameter {secret!r}" if secret is not None else "a user before its host"
        raise ValueError(
            f"the address {scheme}://...{host} holds credentials ({part}), and recipes are published "
            "in manifests; remove them and give access by the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, HF_TOKEN, "
            "GOOGLE_APPLICATION_CREDENTIALS) or a role"
        )
    return address


def _is_secret(name: str) -> bool:
    return bool(_SECRET_PART.search(name)) or name.lower() in _SECRET_NAMES


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
            found = [match for match in filesystem.glob(path) if filesystem.isfile(match)]
        else:
            found = filesystem.find(path) if filesystem.isdir(path) else [path] if filesystem.exists(path) else []
    return [match if is_address(match) else f"{protocol}://{match.lstrip('/')}" for match in found]


class RemoteFile(io.RawIOBase):
    """A file of fsspec whose errors are all OSErrors: those of a store's own library often are not."""

    def __init__(self, file: Any):
        super().__init__()
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with as_os_errors():
            return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

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
