"""`gristmill launch`: the script that starts a training on several machines."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.options import (
    RecipeArgument,
    SetOption,
    WorkdirOption,
    output_file,
    with_option_groups,
    workdir_of,
)
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.preflight import require_ready
from gristmill.pipelines.stages.stage_list import STAGES

# Scripts that start a training on several machines: a Slurm job, a script for torchrun or ssh, cloud task files.


Launcher = Literal["slurm", "torchrun", "ssh", "skypilot", "dstack"]
PORT = 29500  # torchrun's own default; Slurm jobs, which may share a node's past, take one by their number
SAVING_SECONDS = 300  # between the signal before the end of a job and its end: a step and a checkpoint
FIRST_LINE = "# Written by gristmill launch"  # in bash the second
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
            f"{FIRST_LINE}: {machines.nodes} nodes of {machines.processes} processes. Submit with: sbatch FILE",
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
            f"{FIRST_LINE}: {machines.nodes} nodes of {machines.processes} processes. Run: {usage}",
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
    first = f"{FIRST_LINE}, a template: name your GPUs and your image. Run: {usage}\n"
    return first + yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=1000)


SUFFIX = {"skypilot": ".sky.yaml", "dstack": ".dstack.yml"}  # NAME.yaml is the recipe


@dataclass(frozen=True)
class LauncherOptions:
    """Choice of the program that starts the processes: one of these."""

    slurm: Annotated[bool, typer.Option("--slurm", help="A Slurm job.")] = False
    torchrun: Annotated[bool, typer.Option("--torchrun", help="A script to run on each node.")] = False
    ssh: Annotated[bool, typer.Option("--ssh", help="A script that starts the nodes of --hosts.")] = False
    skypilot: Annotated[bool, typer.Option("--skypilot", help="A task file of SkyPilot.")] = False
    dstack: Annotated[bool, typer.Option("--dstack", help="A task file of dstack.")] = False

    def chosen(self) -> Launcher:
        names: list[Launcher] = ["slurm", "torchrun", "ssh", "skypilot", "dstack"]
        chosen = [name for name in names if getattr(self, name)]
        if len(chosen) != 1:
            raise RecipeError("give one of --slurm, --torchrun, --ssh, --skypilot and --dstack")
        return chosen[0]


@dataclass(frozen=True)
class MachineOptions:
    """Where it runs."""

    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="Number of machines.")] = 1
    processes: Annotated[int, typer.Option(min=1, max=1024, help="Processes a machine: one a GPU.")] = 8
    cpu: Annotated[bool, typer.Option("--cpu", help="Machines without GPUs.")] = False
    hours: Annotated[float, typer.Option(min=0.1, max=10_000, help="Time limit of a Slurm job.")] = 24.0
    interface: Annotated[
        str | None, typer.Option(help="Network device between the nodes (default: NCCL and gloo look for it).")
    ] = None
    hosts: Annotated[str | None, typer.Option(help="Machines of --ssh: host1,host2 ...")] = None

    def machines(self) -> Machines:
        """Raises RecipeError for host names that are none."""
        hosts = tuple(self.hosts.split(",")) if self.hosts else ()
        for host in hosts:
            if not host or host.startswith("-"):
                raise RecipeError(f"--hosts {self.hosts}: write names separated by commas, such as node1,node2")
        nodes = len(hosts) if hosts and self.nodes == 1 else self.nodes
        return Machines(nodes, self.processes, not self.cpu, self.hours, self.interface, hosts)


@dataclass(frozen=True)
class ScriptOptions:
    """Options for writing or submitting the script."""

    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=output_file, help="Default: NAME.sh, .sky.yaml or .dstack.yml."),
    ] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit the Slurm job, or start the nodes by ssh.")] = False


@with_option_groups
def launch(
    recipe: RecipeArgument,
    launcher: LauncherOptions,
    where: MachineOptions,
    script_options: ScriptOptions,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
) -> None:
    """Write the script that trains a recipe on several machines, and submit it with --submit."""
    kind, machines, submit = launcher.chosen(), where.machines(), script_options.submit
    if (kind == "ssh") != bool(machines.hosts):
        raise RecipeError("--ssh needs --hosts host1,host2 ..., and only --ssh takes them")
    if submit and kind not in ("slurm", "ssh"):
        raise RecipeError(f"--submit does not go with --{kind}; run the file on each node or by its own program")
    program = {"slurm": "sbatch", "ssh": "bash"}.get(kind, "")
    if submit and shutil.which(program) is None:
        raise InputError(f"{program} is not here; run this on a machine that has it, or without --submit")
    loaded = load_recipe(recipe, set_ or [])
    check_machines(loaded, machines)
    command = train_command(recipe, workdir_of(loaded, workdir).resolve(), set_ or [])
    path = script_options.output or Path(f"{loaded.name}{SUFFIX.get(kind, '.sh')}")
    if path.exists() and FIRST_LINE.encode() not in path.read_bytes()[:200]:
        raise RecipeError(f"{path} stands there already and is not of this command; name another file with --output")
    write_atomic(path, script(kind, loaded.name, command, machines).encode())
    print(f"{path}: {machines.nodes} nodes x {machines.processes} processes")
    if submit and subprocess.run([program, str(path)], check=False).returncode:
        raise InputError(f"{program} {path} failed; see its message above")
