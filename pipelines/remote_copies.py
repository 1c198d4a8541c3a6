"""`verify`, `reproduce` and `plan` of a work folder in a store: of a fresh copy, not of the mirror, which may be in
use."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gristmill.foundation.addresses import is_address
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.pipelines.remote_work import RemoteWork, mirror_of
from gristmill.pipelines.verify import Verification, verify


def verify_address(location: str) -> Verification:
    """As `verify`, of what is published at the address, every byte of which is downloaded."""
    with _copied(location, with_outputs=True) as (remote, folder):
        found = verify(folder)
        extra = [f"{remote.store.address}/{name}: in no manifest; delete it" for name in remote.unlisted()]
    here, there = str(remote.mirror), remote.store.address
    return Verification(
        [line.replace(here, there) for line in found.lines], [line.replace(here, there) for line in found.wrong] + extra
    )


@contextmanager
def manifest_folder(location: str) -> Iterator[Path]:
    """A folder with the manifest; of an address that is a copy without the stage's other files."""
    if is_address(location):
        with _copied(location, with_outputs=False) as (_, folder):
            yield folder
    else:
        path = Path(location)
        yield path.parent if path.name == MANIFEST_NAME else path


@contextmanager
def plan_folder(folder: Path) -> Iterator[Path]:
    """The work folder; of a mirror a folder with the manifests that are published now, and with its interrupted
    stages."""
    remote = RemoteWork.behind(folder)
    if remote is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        copy = RemoteWork(Path(name), remote.store)
        copy.fetch(with_outputs=False)
        for path in folder.glob(".*-*"):
            (copy.mirror / path.name).mkdir()
        yield copy.mirror


@contextmanager
def _copied(location: str, with_outputs: bool) -> Iterator[tuple[RemoteWork, Path]]:
    mirror = mirror_of(location)
    behind = RemoteWork.behind(mirror)
    assert behind is not None
    with tempfile.TemporaryDirectory() as name:
        copy = RemoteWork(Path(name), behind.store)
        if not copy.fetch(with_outputs=with_outputs):
            raise InputError(f"{location}: no published stage here (STAGE.json); check the address")
        yield copy, copy.mirror / mirror.relative_to(behind.mirror)
