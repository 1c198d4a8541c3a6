"""Tasks and results on their way between machines: small ones as they are, large ones as the address of a file.

Ray copies messages over 100 kB through its object store and keeps them in the driver's memory, so masks and tables
of a task travel as a file of the shared work folder. The file is named by its content and is whole or absent: two runs
of a task write the same one."""

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path

MAX_MESSAGE_BYTES = 65536
ALIGNMENT = 64  # of each array in the file: compiled kernels need aligned arrays


@dataclass(frozen=True)
class Parcel:
    """A pickled value. sizes: bytes of its pieces, the pickle first, then the buffers of its arrays; each piece starts
    at a multiple of ALIGNMENT. content: the pieces; "" if they are in the file `path`."""

    sizes: tuple[int, ...]
    content: bytes
    path: str = ""


def packed(value: Any, folder: Path) -> Parcel:
    """The value, of which a large one is written to a file in the folder.

    Raises TypeError or pickle.PicklingError if it cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = tuple(piece.nbytes for piece in pieces)
    if sum(map(_padded, sizes)) <= MAX_MESSAGE_BYTES:
        held = io.BytesIO()
        _write(held, pieces)
        return Parcel(sizes, held.getvalue())
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    path = folder / f"{hasher.hexdigest()}.parcel"
    if not path.exists():
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            _write(file, pieces)
    return Parcel(sizes, b"", str(path))


def unpacked(parcel: Parcel) -> Any:
    """The value; its arrays can be written to. Raises InputError if the file is gone."""
    content = bytearray(parcel.content)
    if parcel.path:
        try:
            content = bytearray(os.path.getsize(parcel.path))
            with open(parcel.path, "rb") as file:
                file.readinto(content)
        except OSError as error:
            raise InputError(f"{parcel.path}: a task's file cannot be read ({error.strerror})") from error
    view, at, pieces = memoryview(content), 0, []
    for size in parcel.sizes:
        pieces.append(view[at : at + size])
        at += _padded(size)
    return pickle.loads(pieces[0], buffers=pieces[1:])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write(file: Any, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        file.write(piece)
        file.write(bytes(_padded(piece.nbytes) - piece.nbytes))
