"""Full and read-only disks: a small file system in memory, mounted in a namespace of its own."""

import resource
import shutil
import subprocess
import sys

import pytest
import torch

from gristmill.evaluation.convert.safetensors_folder import write_safetensors
from gristmill.foundation.errors import explain_disk_error

FULL = """
mount -t tmpfs -o size=256k tmpfs {folder}
{python} -c '{script}' {folder}/work
"""
READ_ONLY = """
mount -t tmpfs -o size=256k tmpfs {folder} && mount -o remount,ro {folder}
{python} -c '{script}' {folder}/work
"""
# Two stages; the second writes Parquet in two workers until the disk is full.
SCRIPT = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.progress import Reporter
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.lock import Lock
from gristmill.pipelines.stages.runner import Runner
from gristmill.pipelines.stages.stage import Stage
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.cli import commands as application, main as cli

recipe = Recipe.model_validate({
    "name": "r", "sources": [{"name": "s", "format": "text", "paths": ["x"]}],
    "model": {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8}, "train": {"tokens": 64, "batch_tokens": 16},
})

def first(context):
    write_atomic(context.folder / "file", b"small")
    return {}

def write(path):
    with atomic_path(path) as temporary:
        pq.write_table(pa.table({"x": np.random.default_rng(0).random(100_000)}), temporary)

def second(context):
    write(context.folder / "large.parquet")
    return {}

def run(args=None):
    stages = [Stage("a", 1, (), lambda r: {}, first), Stage("b", 1, ("a",), lambda r: {}, second)]
    Runner(recipe, Path(sys.argv[1]), stages, Lock(sources=()), Reporter.to_terminal()).run()

application.app = run
try:
    cli.main()
finally:
    print("left:", sorted(str(p.relative_to(sys.argv[1])) for p in Path(sys.argv[1]).rglob("*") if p.is_file()))
"""


@pytest.fixture
def mounted(tmp_path):
    """Runs a script in a namespace where file systems can be mounted; skips where the machine forbids it."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system in a namespace (unshare -rm)")
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(commands):
        text = commands.replace("-c '{script}'", str(tmp_path / "script.py"))
        text = text.format(folder=tmp_path / "disk", python=sys.executable)
        done = subprocess.run([unshare, "-rm", "sh", "-c", text], capture_output=True, text=True, timeout=300)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_a_full_disk(mounted):
    code, said = mounted(FULL)
    assert "the disk is full; free some space" in said and "Traceback" not in said, said
    assert code == 1
    assert "'a/manifest.json'" in said and ".tmp" not in said.split("left:")[1].split("]")[0]


def test_a_read_only_disk(mounted):
    code, said = mounted(READ_ONLY)
    assert "the disk is read-only" in said and "Traceback" not in said, said
    assert code == 1


def test_a_full_disk_during_export_is_reported_in_one_sentence(tmp_path):
    """safetensors raises its own error class; a limit on file sizes fails its write as a full disk does."""
    path = tmp_path / "model.safetensors"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="model") as caught:
            write_safetensors(path, {"weight": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert explain_disk_error(caught.value).startswith(f"{path}: the file is larger than the disk or a limit")
    assert list(tmp_path.iterdir()) == []
