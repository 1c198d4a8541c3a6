"""`gristmill launch`: the script that starts a training on several machines."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.pipelines.cli.options import RecipeArgument, SetOption, WorkdirOption, with_option_groups, workdir_of
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.launch import Launcher, Machines, check_machines, script, train_command

SUFFIX = {"skypilot": ".yaml", "dstack": ".yaml"}


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

    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: NAME.sh or NAME.yaml.")] = None
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
    write_atomic(path, script(kind, loaded.name, command, machines).encode())
    print(f"{path}: {machines.nodes} nodes x {machines.processes} processes")
    if submit and subprocess.run([program, str(path)], check=False).returncode:
        raise InputError(f"{program} {path} failed; see its message above")
