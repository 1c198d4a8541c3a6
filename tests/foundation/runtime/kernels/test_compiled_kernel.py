"""The cache of compiled kernels: shared by all processes of a user, private, and never a reason to fail."""

import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gristmill.foundation.runtime.kernels.cached_njit import is_linked
from gristmill.foundation.runtime.kernels.kernel_files import (
    MAGIC,
    acquire,
    kernel_folder,
    read_kernel,
    refusal,
    release,
    versions,
    write_kernel,
)

pytestmark = pytest.mark.skipif(not is_linked(), reason="another numba than the linked ones keeps kernels itself")

KERNEL = """
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

@cached_njit()
def add_one(x):
    return x + 1
"""
CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from kernel import add_one
value = add_one(3)
print(value, int("numba" not in sys.modules or bool(add_one.dispatcher.stats.cache_hits)))
"""


@pytest.fixture
def call(tmp_path):
    """Calls a kernel in its own process: returns (its result and 1 if it came from the cache, standard error)."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "call.py").write_text(CALL)

    def run(clone: Path = tmp_path) -> tuple[str, str]:
        environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, str(tmp_path / "call.py"), str(clone)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


def test_a_second_clone_of_the_same_sources_uses_the_kernels_of_the_first(call, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kernel.py").write_text(KERNEL)
    assert call() == ("4 0", "")
    assert call(tmp_path / "other") == ("4 1", "")


def test_settings_of_numba_have_kernels_of_their_own(monkeypatch):
    plain = versions()
    versions.cache_clear()
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    assert versions() != plain
    versions.cache_clear()


@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda content: content[:-1] + b"?", lambda _: b""])
def test_a_damaged_kernel_is_not_read(tmp_path, capsys, damage):
    path = tmp_path / "add-1.kernel"
    write_kernel(path, b"machine code")
    path.write_bytes(damage(path.read_bytes()))
    assert read_kernel(path) is None
    assert read_kernel(path) is None
    assert capsys.readouterr().err == f"kernel cache: {path} is damaged; it is made again\n"


def test_a_kernel_that_others_can_write_to_is_not_read(call, tmp_path):
    call()
    (entry,) = (tmp_path / "cache").glob("*.entry")
    entry.chmod(0o666)
    assert call() == ("4 1", f"kernel cache: {entry} can be written by others; it is made again\n")
    assert entry.stat().st_mode & 0o777 == 0o600  # written anew, from what numba reads
    (path,) = (tmp_path / "cache").glob("*.kernel")
    path.chmod(0o666)
    assert call() == ("4 1", "")
    entry.unlink()
    assert call() == ("4 0", f"kernel cache: {path} can be written by others; it is made again\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert call() == ("4 1", "")


def test_an_entry_that_cannot_be_linked_is_left_to_numba(call, tmp_path):
    call()
    (entry,) = (tmp_path / "cache").glob("*.entry")
    code, _, imported, constants = pickle.loads(read_kernel(entry))
    write_kernel(entry, pickle.dumps((code, "absent", imported, constants)))
    value, error = call()
    assert value == "4 1" and error.startswith(f"kernel cache: {entry} cannot be linked")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Asks for the folder anew, with these environment variables and a folder for temporary files in tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("GRISTMILL_KERNEL_CACHE", raising=False)

    def ask(**variables: Path) -> Path | None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        kernel_folder.cache_clear()
        return kernel_folder()

    yield ask
    kernel_folder.cache_clear()


def test_the_folder_is_below_the_users_cache(folder, tmp_path):
    found = folder(XDG_CACHE_HOME=tmp_path)
    assert found == tmp_path / "gristmill" / "kernels"
    assert found.stat().st_mode & 0o777 == 0o700


def test_the_folder_can_be_chosen(folder, tmp_path):
    assert folder(GRISTMILL_KERNEL_CACHE=tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_a_folder_that_others_can_write_to_is_not_used(folder, tmp_path, capsys):
    chosen, fallback = tmp_path / "cache", tmp_path / f"gristmill-kernels-{os.geteuid()}"
    chosen.mkdir()
    chosen.chmod(0o777)
    assert folder(GRISTMILL_KERNEL_CACHE=chosen) == fallback
    assert capsys.readouterr().err == (
        f"kernel cache: {chosen} belongs to another user or can be written by others (mode 0777); using {fallback} "
        "(set GRISTMILL_KERNEL_CACHE to a folder that only you can write to)\n"
    )
    assert fallback.stat().st_mode & 0o777 == 0o700


def test_without_any_folder_kernels_are_compiled_in_memory(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / f"gristmill-kernels-{os.geteuid()}").write_text("")
    assert folder(GRISTMILL_KERNEL_CACHE=tmp_path / "file") is None
    assert re.fullmatch(
        r"kernel cache: \S+ cannot be created \(File exists\); every process compiles .*\n", capsys.readouterr().err
    )
    namespace = {"__name__": "__main__"}
    exec(compile(KERNEL, __file__, "exec"), namespace)  # its cache is asked for the folder at the call
    assert namespace["add_one"](3) == 4


def test_a_link_is_not_used(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert refusal(tmp_path / "real") is None
    assert refusal(tmp_path / "link") == "is not a folder"


def test_a_written_kernel_is_read_back(tmp_path):
    path = tmp_path / "add-1.kernel"
    assert read_kernel(path) is None
    write_kernel(path, b"machine code")
    assert read_kernel(path) == b"machine code"
    assert path.read_bytes().startswith(MAGIC)
    assert [each.name for each in tmp_path.iterdir()] == ["add-1.kernel"]


def test_kernels_that_nobody_reads_are_removed(tmp_path):
    cache, other = tmp_path / "cache", tmp_path / "other"
    cache.mkdir()
    other.mkdir()
    for name in ("old", "read"):
        write_kernel(other / f"{name}.kernel", b"code")
        os.utime(other / f"{name}.kernel", (0, time.time() - 40 * 86400))
        (other / f"{name}.kernel").rename(cache / f"{name}.kernel")
    assert read_kernel(cache / "read.kernel") == b"code"
    write_kernel(cache / "new.kernel", b"code")
    assert sorted(path.name for path in cache.iterdir()) == ["new.kernel", "read.kernel"]


OWNER = """
import sys, time
from pathlib import Path
from gristmill.foundation.runtime.kernels.kernel_files import acquire, write_kernel
path = Path(sys.argv[1])
assert not acquire(path)
print("locked", flush=True)
sys.stdin.readline()
write_kernel(path, b"compiled once")
"""


def owner(path: Path) -> subprocess.Popen:
    """A process that has the lock of a kernel's file."""
    command = [sys.executable, "-c", OWNER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_process_waits_for_another_that_compiles_the_same_kernel(tmp_path):
    path = tmp_path / "add-1.kernel"
    process = owner(path)
    assert not acquire(tmp_path / "other-1.kernel")  # another kernel is free
    process.stdin.write("\n")
    process.stdin.close()
    assert acquire(path)  # it returns when the file is there
    assert read_kernel(path) == b"compiled once"
    assert process.wait() == 0


def test_a_killed_process_blocks_nobody(tmp_path):
    path = tmp_path / "add-1.kernel"
    process = owner(path)
    process.kill()
    process.wait()
    assert not acquire(path)
    assert read_kernel(path) is None
    release(path)


def test_processes_at_the_same_moment_compile_a_kernel_once(call, tmp_path):
    command = [sys.executable, str(tmp_path / "call.py"), str(tmp_path)]
    environment = os.environ | {"GRISTMILL_KERNEL_CACHE": str(tmp_path / "cache")}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(process.communicate()[0].strip() for process in both) == ["4 0", "4 1", "4 1"]
