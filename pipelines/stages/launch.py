"""Scripts that start a training on several machines: a Slurm job, a script for torchrun or ssh, cloud task files."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.preflight import require_ready
from gristmill.pipelines.stages.stage_list import STAGES

Launcher = Literal["slurm", "torchrun", "ssh", "skypilot", "dstack"]
PORT = 29500  # torchrun's own default; Slurm jobs, which may share a node's past, take one by their number
SAVING_SECONDS = 300  # between the signal before the end of a job and its end: a step and a checkpoint
RESTARTS = 10  # of a job, by nodes that fail or the end of its time; bounds a run that fails at once each time

# Variable -> value and why. NCCL and gloo choose well by themselves but for these.
VARIABLES = {
    "NCCL_DEBUG": ("WARN", "errors of NCCL are printed with their cause"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", "a failed collective ends its process instead of hanging the job"),
    "TORCH_FR_BUFFER_SIZE": ("2000", "the last collectives of each rank are kept, and dumped at a time-out"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "the same"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "sequences of unequal lengths do not fragment the memory"),
    "PYTHONUNBUFFERED": ("1", "the log is complete when a process is killed"),
}


@dataclass(frozen=True)
class Machines:
    """nodes x processes ranks; accelerators: whether a process has a GPU of its own. hours: of a Slurm job. interface:
    the network device between the nodes, or None where NCCL and gloo find it. hosts: of ssh."""

    nodes: int
    processes: int
    accelerators: bool = True
    hours: float = 24.0
    interface: str | None = None
    hosts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


def check_machines(recipe: Recipe, machines: Machines) -> None:
    """Raises RecipeError where the recipe's layout is for another number of processes, or cannot run on these."""
    layout = recipe.training().train.layout
    if not layout.auto and layout.world_size != machines.world_size:
        raise RecipeError(
            f"train.layout has {layout.world_size} processes, {machines.nodes} x {machines.processes} = "
            f"{machines.world_size} are launched; give --nodes and --processes to match, or --set train.layout=auto"
        )
    if machines.hosts and len(machines.hosts) != machines.nodes:
        raise RecipeError(f"--hosts names {len(machines.hosts)} machines, --nodes {machines.nodes}; they must agree")
    train = [stage for stage in STAGES if stage.name == "train"]
    require_ready(recipe, train, Path("."), machines.world_size, Reporter.silent())


def train_command(recipe: str, workdir: Path, overrides: list[str]) -> str:
    """The command of one rank. Paths are absolute, as the nodes must see them."""
    path = str(Path(recipe).resolve()) if Path(recipe).is_file() else recipe
    words = [sys.executable, "-m", "gristmill.pipelines.cli.main", "train", path, "--workdir", str(workdir)]
    return shlex.join([*words, *(word for text in overrides for word in ("--set", text)), "--log-json"])


def script(launcher: Launcher, name: str, command: str, machines: Machines) -> str:
    """The file to submit or run. command: of one rank, see `train_command`."""
    if launcher == "slurm":
        return _slurm(name, command, machines)
    if launcher == "skypilot":
        return _skypilot(name, command, machines)
    if launcher == "dstack":
        return _dstack(name, command, machines)
    return _node_script(command, machines)


def _exports(machines: Machines) -> list[str]:
    lines = ["# What the libraries of communication need to be told, and why:"]
    lines += [f"export {key}=${{{key}:-{value}}}  # {why}" for key, (value, why) in VARIABLES.items()]
    if machines.interface is not None:
        for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            lines.append(f"export {key}={shlex.quote(machines.interface)}  # the network between the nodes")
    return lines


def _health_check(machines: Machines) -> str:
    """The command that a node runs before any rank starts: fails where something is missing."""
    wanted = f" --gpus {machines.processes}" if machines.accelerators else ""
    return f"{shlex.quote(sys.executable)} -m gristmill.pipelines.cli.main doctor{wanted}"


def _slurm(name: str, command: str, machines: Machines) -> str:
    """Ranks are Slurm's own tasks, without torchrun between: a signal reaches them at once, and Slurm's time to save is
    theirs. See https://slurm.schedmd.com/sbatch.html for --signal, --requeue and --kill-on-bad-exit."""
    hours, minutes = divmod(round(machines.hours * 60), 60)
    gpus = [f"#SBATCH --gpus-per-node={machines.processes}"] if machines.accelerators else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {machines.nodes} nodes of {machines.processes} processes. Submit with: sbatch FILE",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --nodes={machines.nodes}",
            f"#SBATCH --ntasks-per-node={machines.processes}",
            *gpus,
            f"#SBATCH --time={hours:02d}:{minutes:02d}:00",
            f"#SBATCH --signal=TERM@{SAVING_SECONDS}  # to the ranks: they finish the step, save and end",
            "#SBATCH --requeue --open-mode=append",
            f"#SBATCH --output={name}-%j.log",
            "set -u",
            *_exports(machines),
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            "# Every node is asked before any rank starts.",
            f"srun --ntasks-per-node=1 --ntasks={machines.nodes} {_health_check(machines)} || exit 2",
            "srun --kill-on-bad-exit=1 bash -c '",
            "  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS",
            f"  export LOCAL_WORLD_SIZE={machines.processes} TORCHELASTIC_RESTART_COUNT=${{SLURM_RESTART_COUNT:-0}}",
            f"  exec {_inside_quotes(command)}'",
            "code=$?",
            "# 128 and more: a signal, at the end of the time or of a node; 75: a rank hung. The run goes on.",
            f"if [ $code -eq 75 -o $code -ge 128 ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {RESTARTS} ]; then",
            '  scontrol requeue "$SLURM_JOB_ID" && exit 0',
            "fi",
            "exit $code",
            "",
        ]
    )


def _inside_quotes(command: str) -> str:
    """The command as a part of a text in single quotes."""
    return command.replace("'", "'\\''")


def _torchrun(command: str, machines: Machines, rank: str, head: str) -> str:
    """rank, head: what stands for the node's rank and for the first node's address in the script."""
    rank_command = command.removeprefix(shlex.quote(sys.executable) + " ")
    return (
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --nnodes {machines.nodes} "
        f"--nproc-per-node {machines.processes} --node-rank {rank} --master-addr {head} --master-port {PORT} "
        f"--shutdown-timeout {SAVING_SECONDS} --max-restarts {RESTARTS} {rank_command}"
    )


def _node_script(command: str, machines: Machines) -> str:
    """One file: with a rank and the first node's address it starts a node; with `machines.hosts` and no arguments it
    starts itself on each of them by ssh, and ends all when one ends badly."""
    usage = "bash FILE NODE_RANK FIRST_NODE, on each node"
    by_ssh = []
    if machines.hosts:
        usage = "bash FILE, on a machine that reaches the nodes by ssh and shares this folder with them"
        by_ssh = [
            "if [ $# -eq 0 ]; then",
            f"  hosts=({shlex.join(machines.hosts)})",
            "  trap 'kill $(jobs -p) 2>/dev/null' EXIT  # -tt: what ends the ssh ends its node",
            '  for rank in "${!hosts[@]}"; do',
            '    ssh -tt -o BatchMode=yes "${hosts[$rank]}" bash "$(printf %q "$(realpath "$0")")" "$rank" '
            '"${hosts[0]##*@}" < /dev/null &',
            "  done",
            '  for _ in "${hosts[@]}"; do wait -n || exit $?; done',
            "  exit 0",
            "fi",
        ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {machines.nodes} nodes of {machines.processes} processes. Run: {usage}",
            "set -eu",
            *by_ssh,
            *_exports(machines),
            _health_check(machines),
            f"cd {shlex.quote(str(Path.cwd()))}",
            f"exec {_torchrun(command, machines, chr(34) + '$1' + chr(34), chr(34) + '$2' + chr(34))}",
            "",
        ]
    )


def _skypilot(name: str, command: str, machines: Machines) -> str:
    """See https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html for the variables."""
    head = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    run = [*_exports(machines), _torchrun(command, machines, '"$SKYPILOT_NODE_RANK"', head)]
    resources = {"accelerators": f"H100:{machines.processes}"} if machines.accelerators else {"cpus": "4+"}
    task = {"name": name, "num_nodes": machines.nodes, "resources": resources, "run": _Script("\n".join(run) + "\n")}
    return _yaml("sky launch FILE; with `sky jobs launch` it goes on elsewhere after a preemption", task)


def _dstack(name: str, command: str, machines: Machines) -> str:
    """See https://dstack.ai/docs/concepts/tasks#distributed-tasks for the variables."""
    torchrun = _torchrun(command, machines, '"$DSTACK_NODE_RANK"', '"$DSTACK_MASTER_NODE_IP"')
    resources = {"gpu": f"H100:{machines.processes}"} if machines.accelerators else {"cpu": "4.."}
    task = {
        "type": "task",
        "name": name,
        "nodes": machines.nodes,
        "commands": [*_exports(machines)[1:], torchrun],
        "resources": resources,
    }
    return _yaml("dstack apply -f FILE", task)


class _Script(str):
    """Text of several lines, which YAML writes as it is."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Script, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|"))


def _yaml(usage: str, task: dict[str, object]) -> str:
    first = f"# A template: name your GPUs and your image. Run: {usage}\n"
    return first + yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=1000)
