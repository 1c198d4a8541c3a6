"""Files and folders behind fsspec addresses: raw files are read, a folder in an object store takes whole objects.

An object appears whole or not at all, since every upload is of a finished local file or of bytes in memory: a stream
into a store would publish a truncated object if its writer failed. There is no rename; `put_new` and `put_if` are the
only ways to decide between two writers, so a store without them takes no work folder."""

import glob
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gristmill.foundation.checksums import checksum_path, write_known_checksum
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import Stub, atomic_path, is_address, stubs_below, without_credentials, write_atomic
from gristmill.foundation.startup import DeferredModule

# Files behind fsspec addresses (`s3://`, `gs://`, `hf://`, `https://`, `memory://`), read only.
#
# Access is by the libraries' own mechanisms (environment variables, configuration files, roles), never by the recipe: a
# recipe and its manifest are published.

fsspec = DeferredModule("fsspec")  # 0.1 s, for addresses alone
aiohttp = DeferredModule("aiohttp")

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 2


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


asyn = DeferredModule("fsspec.asyn")
BLOCK_BYTES = 8_000_000
REFUSED = (404, 409, 412)  # gone, two conditional writes at once, precondition failed
NO_WORK_FOLDER = "so it cannot take a work folder; use s3:// or another store with If-Match and If-None-Match"


class Store:
    """Objects by name below one address. Every trouble of the store is an InputError that names the address."""

    def __init__(self, address: str):
        try:
            self.address = without_credentials(address.rstrip("/"))
        except ValueError as error:
            raise RecipeError(f"--workdir: {error}") from error
        protocol = self.address.partition("://")[0]
        if protocol not in fsspec.available_protocols():
            raise RecipeError(
                f"--workdir: {self.address}: {protocol}:// is no file system; use s3://, gs:// or a folder"
            )
        with self._errors():
            self._files, self._root = filesystem_of(self.address)

    def read(self, name: str) -> bytes | None:
        """The object, None if there is none."""
        with self._errors():
            try:
                self._files.invalidate_cache()
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._errors():
            return self._files.cat_file(self._path(name), start=start, end=stop)

    def list(self, prefix: str = "") -> dict[str, int]:
        """The names below the prefix, each with its bytes."""
        with self._errors():
            self._files.invalidate_cache()
            entries = self._files.find(self._path(prefix) if prefix else self._root, detail=True)
        # s3fs answers with the folder itself if its first object appears while it looks
        files = {path: entry for path, entry in entries.items() if entry["type"] == "file"}
        return {path.removeprefix(self._root).lstrip("/"): int(entry["size"]) for path, entry in files.items()}

    def put(self, name: str, path: Path) -> None:
        """Upload a whole file."""
        with self._errors():
            self._files.put_file(str(path), self._path(name))

    def copy(self, name: str, target: str) -> None:
        """Copies an object within the store, which moves its bytes itself."""
        with self._errors():
            self._files.cp_file(self._path(name), self._path(target))

    def put_bytes(self, name: str, content: bytes) -> None:
        with self._errors():
            self._pipe(name, content, "overwrite")

    def put_new(self, name: str, content: bytes) -> bool:
        """Whether the object was created; False if there was one, which stays as it is."""
        return self._put_on_condition(name, content, "create")

    def read_tagged(self, name: str) -> tuple[bytes | None, str | None]:
        """The object, and a tag for `put_if`: of this content or of one before it. None, None if there is none."""
        with self._errors():
            try:
                self._files.invalidate_cache()
                tag = self._files.info(self._path(name)).get("ETag")
                content = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None, None
        if not tag:
            raise InputError(f"{self.address}: the store gives no ETag of an object, {NO_WORK_FOLDER}")
        return content, tag

    def put_if(self, name: str, content: bytes, tag: str | None) -> bool:
        """Whether the object was replaced; False if it has another tag by now. tag None: only if there is none."""
        if tag is None:
            return self.put_new(name, content)
        return self._put_on_condition(name, content, "overwrite", IfMatch=tag)

    def _put_on_condition(self, name: str, content: bytes, mode: str, **condition: str) -> bool:
        with self._errors():
            try:
                self._pipe(name, content, mode, **condition)
            except OSError as error:
                if _is_refused(error):
                    return False
                raise
            except (NotImplementedError, TypeError) as error:
                raise InputError(
                    f"{self.address}: the store has no conditional writes ({error}), {NO_WORK_FOLDER}"
                ) from error
            return True

    def delete(self, name: str) -> None:
        with self._errors():
            self._files.rm_file(self._path(name))

    def download(self, name: str, path: Path, expected: tuple[int, str]) -> None:
        """The object as a local file, whole or not at all. expected: its bytes and SHA-256.

        Raises InputError if the object is another one."""
        hasher, size = hashlib.sha256(), 0
        with atomic_path(path) as temporary, self._errors(), temporary.open("wb") as file:
            with self._files.open(self._path(name), "rb", block_size=BLOCK_BYTES, cache_type="readahead") as remote:
                while piece := remote.read(BLOCK_BYTES):
                    hasher.update(piece)
                    file.write(piece)
                    size += len(piece)
            if (size, hasher.hexdigest()) != expected:
                raise InputError(
                    f"{self.address}/{name}: {size} bytes with sha256 {hasher.hexdigest()[:16]}..., its manifest says "
                    f"{expected[0]} bytes with {expected[1][:16]}...; run the stage that writes it again"
                )

    def check_writable(self) -> None:
        """Raises InputError if the store cannot be written to or cannot decide between two writers."""
        name = f".probe-{uuid.uuid4().hex}"
        self.list("lease")  # a store that is silent, or a bucket that is not there, is found by a reading call
        created = [self.put_new(name, b"1"), self.put_new(name, b"2")]
        _, tag = self.read_tagged(name)
        replaced = [self.put_if(name, b"3", tag), self.put_if(name, b"4", tag)]
        self.delete(name)
        for header, outcomes in (("If-None-Match", created), ("If-Match", replaced)):
            if outcomes != [True, False]:
                raise InputError(
                    f"{self.address}: the store ignores {header}, so two writers could not see each other; use one "
                    "with conditional writes (S3, R2, MinIO, SeaweedFS)"
                )

    def _pipe(self, name: str, content: bytes, mode: str, **condition: str) -> None:
        """Ends after READ_SECONDS: aiohttp waits for the store's "100 Continue" for ever."""
        if self._files.async_impl:
            call, seconds = self._files._pipe_file, READ_SECONDS
            asyn.sync(self._files.loop, call, self._path(name), content, mode=mode, timeout=seconds, **condition)
        else:
            self._files.pipe_file(self._path(name), content, mode=mode, **condition)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except ImportError as error:
            raise RecipeError(
                f"{self.address}: its package is missing ({error}); install it: pip install 'gristmill[cluster]' -c "
                "constraints.txt (s3), gcsfs (gs)"
            ) from error
        except Exception as error:  # botocore, aiohttp and others have classes of their own
            said = str(error).strip() or type(error).__name__
            if not isinstance(error, OSError):
                said = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{self.address}: {said}; check that the bucket exists, that it may be written to, and the "
                "credentials in the environment"
            ) from error


def _is_refused(error: OSError) -> bool:
    """Whether the store did not write because the write's condition did not hold."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return isinstance(error, FileExistsError) or (status in REFUSED and response["Error"]["Code"] != "NoSuchBucket")


THREADS = 8  # of transfers at once
_stub_stores: dict[Path, Store] = {}  # of the work folders of this process's engines


def use_stubs(root: Path, store: Store) -> None:
    """In this process `fetch` and `read_range` (task_files.py) give the content of the work folder's stubs."""
    _stub_stores[root] = store


def has_stubs() -> bool:
    """Whether a work folder of this process may have stubs."""
    return bool(_stub_stores)


def store_behind(path: Path) -> Store | None:
    return next((store for root, store in _stub_stores.items() if path.is_relative_to(root)), None)


def download_stub(store: Store, path: Path, stub: Stub) -> None:
    """The stub becomes the file that it stands for."""
    has_checksum = checksum_path(path).exists()
    store.download(stub.object, path, (path.stat().st_size, stub.sha256))
    if has_checksum:
        write_known_checksum(path, stub.xxh3)


def download_stubs(store: Store, folder: Path) -> None:
    """As `download_stub`, of all below the folder."""
    with ThreadPoolExecutor(THREADS) as threads:
        for download in [threads.submit(download_stub, store, path, stub) for path, stub in stubs_below(folder)]:
            download.result()


# Large files of an object store as sparse local files: what is read is downloaded, block by block, and stays.

DOWNLOAD_BLOCK_BYTES = 4 << 20


class BlockFile:
    """A file whose missing blocks are downloaded. path: of the sparse file. mark: JSON that names the object; beside it
    is one byte a block, which is 1 once the block is there. Several processes may read at once."""

    def __init__(self, path: Path, mark: Path):
        self.path, self.mark = path, mark
        try:
            content = orjson.loads(mark.read_bytes())
            self._address, self._name, self.num_bytes = content["address"], content["object"], content["bytes"]
            self._block_bytes = content["block_bytes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{mark}: not readable ({error}); remove {path} and {mark.parent}") from error

    @classmethod
    def create(cls, path: Path, mark: Path, source: tuple[Store, str], num_bytes: int) -> "BlockFile":
        """source: store and name of the object. A stub at the path stays until the mark and its map are there: a kill
        leaves nothing that could be taken for content."""
        content = {
            "address": source[0].address,
            "object": source[1],
            "bytes": num_bytes,
            "block_bytes": DOWNLOAD_BLOCK_BYTES,
        }
        _write_sparse(_map_path(mark), -(-num_bytes // DOWNLOAD_BLOCK_BYTES))
        write_atomic(mark, orjson.dumps(content))
        _write_sparse(path, num_bytes)
        return cls(path, mark)

    @cached_property
    def _store(self) -> Store:
        return Store(self._address)

    @cached_property
    def _present(self) -> np.ndarray:
        return np.memmap(_map_path(self.mark), np.uint8, "r+") if self.num_bytes else np.empty(0, np.uint8)

    @cached_property
    def content(self) -> np.ndarray:
        """uint8[num_bytes]: of what is not there yet zeros; call `load` first."""
        return np.memmap(self.path, np.uint8, "r") if self.num_bytes else np.empty(0, np.uint8)

    def load(self, start: int, stop: int) -> None:
        """The bytes start..stop - 1 are there. Raises InputError if the store does not give them."""
        first, last = start // self._block_bytes, -(-stop // self._block_bytes)
        missing = first + np.flatnonzero(self._present[first:last] == 0) if stop > start else []
        if not len(missing):
            return
        with _opened(self.path) as descriptor:
            for block in np.asarray(missing).tolist():
                begin = block * self._block_bytes
                end = min(begin + self._block_bytes, self.num_bytes)
                content = self._store.read_range(self._name, begin, end)
                if len(content) != end - begin:
                    raise InputError(f"{self._address}/{self._name}: shorter than its manifest says; verify it")
                os.pwrite(descriptor, content, begin)
                os.fdatasync(descriptor)
                self._present[block] = 1


class BlockArray:
    """One-dimensional array in a BlockFile; slices are NumPy arrays, whose blocks are downloaded."""

    def __init__(self, file: BlockFile, dtype: np.dtype):
        self._file, self.dtype = file, dtype

    def __len__(self) -> int:
        return self._file.num_bytes // self.dtype.itemsize

    def __getitem__(self, key: Any) -> Any:
        first, last, _ = key.indices(len(self)) if isinstance(key, slice) else (int(key), int(key) + 1, 1)
        self._file.load(first * self.dtype.itemsize, max(last, first) * self.dtype.itemsize)
        return self._file.content.view(self.dtype)[key]

    def with_ranges(self, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The whole array; these ranges of it are there."""
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            self._file.load(first * self.dtype.itemsize, (first + length) * self.dtype.itemsize)
        return np.asarray(self._file.content.view(self.dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _write_sparse(path: Path, num_bytes: int) -> None:
    with atomic_path(path) as temporary:
        os.truncate(temporary, num_bytes)


def _map_path(mark: Path) -> Path:
    return mark.with_suffix(".blocks")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
