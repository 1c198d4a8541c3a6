"""Scripts that start a training on several machines, and what they refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.launch import Machines, check_machines, script, train_command
from gristmill.pipelines.recipes.recipe_file import RECIPES, load_recipe
from tests.support.kills import Launcher, files_of, write_corpus
from tests.support.net_namespaces import network, why_not
from tests.support.one_node_slurm import one_node_slurm

PROGRAM = str(Path(sys.executable).with_name("gristmill"))


def test_ranks_must_be_those_of_the_layout():
    recipe = load_recipe("demo", ["train.layout.data=4"])
    check_machines(recipe, Machines(2, 2))
    with pytest.raises(RecipeError, match=r"train.layout has 4 processes, 2 x 8 = 16 are launched"):
        check_machines(recipe, Machines(2, 8))
    with pytest.raises(RecipeError, match=r"--hosts names 1 machines, --nodes 2"):
        check_machines(recipe, Machines(2, 2, hosts=("a",)))


@pytest.mark.parametrize("launcher", ["slurm", "torchrun", "ssh"])
def test_scripts_are_valid_bash_whatever_the_paths(launcher, tmp_path):
    """Words with spaces, quotes and dollars reach the command as they are."""
    command = train_command("demo", tmp_path / "it's $HOME", ["name=a b"])
    hosts = ("user@a", "b") if launcher == "ssh" else ()
    file = tmp_path / "train.sh"
    file.write_text(script(launcher, "demo", command, Machines(2, 4, hosts=hosts, interface="eth0")))
    subprocess.run(["bash", "-n", file], check=True)
    assert "export GLOO_SOCKET_IFNAME=eth0" in file.read_text()


def test_a_slurm_script_gives_each_rank_its_place(tmp_path):
    """With stand-ins for srun and scontrol that run each task in turn: what the ranks of node 2 of 2 see."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/bash\nshift; SLURM_PROCID=3 SLURM_LOCALID=1 exec "$@"\n')
    for program in ("scontrol", "srun"):
        (tmp_path / program).chmod(0o755)
    place = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
    told = f"env PLACE='{place}' bash -c 'eval echo $PLACE'"
    text = script("slurm", "demo", told, Machines(2, 2, accelerators=False))
    (tmp_path / "job.sh").write_text("\n".join(line for line in text.splitlines() if "doctor" not in line))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007", "SLURM_NTASKS": "4"}
    ran = subprocess.run(
        ["bash", tmp_path / "job.sh"], env=variables | {"SLURM_JOB_NODELIST": "n[1-2]"}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "3 1 4 2 n1 20007\n", "")


@pytest.mark.parametrize("launcher", ["skypilot", "dstack"])
def test_task_files_are_yaml(launcher):
    task = yaml.safe_load(script(launcher, "demo", train_command("demo", Path("/w"), []), Machines(2, 4)))
    text = task["run"] if launcher == "skypilot" else "\n".join(task["commands"])
    assert task.get("num_nodes", task.get("nodes")) == 2 and "--nnodes 2 --nproc-per-node 4" in text
    assert str(task["resources"]).count("H100:4") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of --slurm"),
        (("--slurm", "--ssh"), "give one of --slurm"),
        (("--ssh",), "--ssh needs --hosts"),
        (("--ssh", "--hosts", "-oProxyCommand=x"), "write names separated by commas"),
        (("--torchrun", "--submit", "--processes", "1"), "--submit does not go with --torchrun"),
        (("--slurm", "--nodes", "2"), "train.layout has 1 processes"),
    ],
)
def test_wrong_commands_write_nothing(options, message, tmp_path):
    ran = subprocess.run([PROGRAM, "launch", "demo", *options], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 2 and message in ran.stderr and "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["torchrun", "skypilot", "dstack"])
def test_no_file_but_its_own_is_replaced(kind, call, tmp_path, monkeypatch):
    """The recipe `demo` is demo.yaml, as task files were."""
    monkeypatch.chdir(tmp_path)
    recipe = Path("demo.yaml")
    recipe.write_bytes((RECIPES / "demo.yaml").read_bytes())
    launch = ("launch", recipe, f"--{kind}", "--processes", 1)
    code, said = call(*launch, "--output", recipe)
    assert code == 2 and "demo.yaml stands there already and is not of this command" in said
    for _ in range(2):  # the second replaces its own
        code, said = call(*launch)
        assert code == 0 and recipe.read_bytes() == (RECIPES / "demo.yaml").read_bytes(), said
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def indexed(tmp_path):
    """A recipe of two ranks, and a work folder that waits for its training."""
    launcher = Launcher(tmp_path / "launcher")
    recipe = write_corpus(tmp_path / "raw")
    recipe.write_text(recipe.read_text().replace("kv_heads: 1", "kv_heads: 2"))
    launcher.run("run", recipe, "--workdir", tmp_path / "work", "--to", "index", "--workers", 1, cwd=tmp_path)
    shutil.copytree(tmp_path / "work", tmp_path / "plain")
    launcher.run("train", recipe, "--workdir", tmp_path / "plain", cwd=tmp_path)
    yield recipe
    launcher.close()


def losses(folder: Path) -> list[float]:
    lines = (folder / "train/metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]


def write_script(recipe: Path, tmp_path: Path, *options: str) -> Path:
    layout = ("--set", "train.layout.data=2", "--cpu", "--workdir", str(tmp_path / "work"))
    subprocess.run([PROGRAM, "launch", str(recipe), *options, *layout, "--output", "job.sh"], cwd=tmp_path, check=True)
    return tmp_path / "job.sh"


@pytest.mark.slow
def test_a_slurm_job_trains_and_goes_on_after_its_end_of_time(indexed, tmp_path, monkeypatch):
    """TERM to the ranks, as at the end of a job's time: they save, the job is queued again and ends the run."""
    with one_node_slurm(tmp_path / "slurm", monkeypatch):
        job = write_script(indexed, tmp_path, "--slurm", "--processes", "2")
        subprocess.run(["sbatch", job], cwd=tmp_path, check=True)
        deadline = time.monotonic() + 400  # Slurm waits 2 minutes before it starts a job again
        while not list((tmp_path / "work").glob(".train-*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        subprocess.run(["scancel", "--signal=TERM", "1"], check=True)
        while not (tmp_path / "work/train/manifest.json").is_file() and time.monotonic() < deadline:
            time.sleep(0.5)
        log = (tmp_path / next(tmp_path.glob("*-1.log"))).read_text()
        assert (tmp_path / "work/train/manifest.json").is_file(), log[-3000:]
        assert "as requested, and saved" in log
    assert losses(tmp_path / "work") == pytest.approx(losses(tmp_path / "plain"), rel=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_machines_train_by_the_script(indexed, tmp_path):
    """The script of --torchrun on two network namespaces."""
    job = write_script(indexed, tmp_path, "--torchrun", "--nodes", "2", "--processes", "1", "--interface", "eth0")
    with network(2) as net:
        first = next(iter(net.machines.values()))
        nodes = [
            subprocess.Popen(net.command(number, "bash", job, rank, first), stderr=subprocess.PIPE, text=True)
            for rank, number in enumerate(net.machines)
        ]
        try:
            errors = [node.communicate(timeout=200)[1] for node in nodes]
        finally:
            for node in nodes:
                node.send_signal(signal.SIGTERM)
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert losses(tmp_path / "work") == pytest.approx(losses(tmp_path / "plain"), rel=2e-5)
    assert files_of(tmp_path / "work/train")
