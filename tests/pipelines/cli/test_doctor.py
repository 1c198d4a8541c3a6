"""`gristmill doctor`, --version and shell completion."""

import os
import subprocess
import sys
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from gristmill.foundation.errors import InputError
from gristmill.pipelines.cli import doctor


@pytest.mark.parametrize(
    ("line", "extra"),
    [("numpy", None), ('ray; extra == "cluster"', "cluster"), ('tomli; python_version < "3.11"', None)],
)
def test_the_extra_of_a_requirement(line, extra):
    assert doctor.extra_of(Requirement(line)) == extra


def test_a_library_of_another_version_is_named_with_its_bounds():
    assert doctor.problem_of(Requirement("pytest")) is None
    outdated = Requirement("pytest>=999")
    assert doctor.problem_of(outdated) is outdated
    assert doctor.quoted(outdated) == "'pytest>=999'"
    assert doctor.quoted(Requirement("no-such-library")) == "no-such-library"


def test_every_requirement_is_looked_at(monkeypatch):
    """With one library missing, one line says how to get it, and the exit code is that of a failure."""
    monkeypatch.setattr(doctor, "_version_of", lambda name: None if name in ("duckdb", "ray") else "99999")
    lines = {seen.what: seen for seen in doctor.libraries()}
    required = [line for line in requires("gristmill") if "extra ==" not in line]
    (wanted,) = (line for line in required if line.startswith("duckdb"))
    assert lines["libraries"].value.startswith(f"{len(required) - 1} of {len(required)}")
    assert lines["libraries"].fix == f"pip install {wanted!r}"
    assert lines["extra cluster"].fix == "for ray: pip install 'gristmill[cluster]'"
    assert lines["extra serve"].fix == ""
    with pytest.raises(InputError, match=rf"^libraries: pip install '{wanted}'$"):
        doctor.doctor()


def test_a_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    disk = next(doctor.disks())
    assert disk.is_required and "change to another" in disk.fix


def test_cores_and_memory_of_a_container_are_said(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(doctor, "host_bytes", lambda: 10**9)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    checks = {check.what: check for check in doctor.machine()}
    assert (checks["cores"].value, checks["memory"].value) == ("3 of 96", "1.0 GB")
    assert "--workers 1" in checks["memory"].fix


def run(*arguments, **variables):
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **variables})


def test_the_version_is_one_line():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("gristmill ") and "torch " in done.stdout and done.stdout.count("\n") == 1


def test_the_shell_completes_commands_and_options():
    complete = {"_GRISTMILL_COMPLETE": "complete_bash", "_MAIN_COMPLETE": "complete_bash"}
    script = "import sys; sys.argv[0] = 'gristmill'; from gristmill.pipelines.cli.main import main; main()"

    def completed(words, place):
        variables = {**os.environ, **complete, "COMP_WORDS": words, "COMP_CWORD": place}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=variables
        )
        return done.stdout.split()

    assert completed("gristmill in", "1") == ["init", "index"]
    assert "--workdir" in completed("gristmill run --w", "2")
