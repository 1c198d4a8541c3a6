"""The wheel, installed into an environment elsewhere, runs the demo from another folder."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_runs_the_demo_elsewhere(tmp_path):
    """Libraries are those of this environment; a shorter training than the demo's own is enough."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("gristmill-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "fresh", folder=tmp_path)
    fresh = tmp_path / "fresh" / "bin" / "python"
    packages = Path(run(fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    run(sys.executable, "-m", "pip", "--python", fresh, "install", "-q", "--no-deps", wheel, folder=tmp_path)
    libraries = [path for path in sys.path if "site-packages" in path] or [sysconfig.get_path("purelib")]
    (packages / "libraries.pth").write_text("\n".join(libraries))  # no editable install is seen: .pth are not nested
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run(fresh, "-P", "-c", "import gristmill.pipelines.stages.runner as r; print(r.__file__)", folder=elsewhere)
    assert Path(where.strip()).is_relative_to(packages), where
    program = tmp_path / "fresh" / "bin" / "gristmill"
    short = ("train.tokens=30k", "evaluate.limit=20")
    said = run(program, "run", "demo", *(word for field in short for word in ("--set", field)), folder=elsewhere)
    assert "report: work/demo/report/report.html" in said, said
    scores = json.loads((elsewhere / "work/demo/evaluate/results.json").read_bytes())["results"]
    assert any(task.startswith("bits_per_byte") for task in scores)
