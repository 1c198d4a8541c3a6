"""The command `work`: one element of an array job, for the engine that wrote its tasks."""

from typing import Annotated

import typer

from gristmill.foundation.runtime.tasks.slurm import TaskFolder


def work(
    tasks: Annotated[
        str, typer.Argument(metavar="TASKS", help="A folder of tasks or its address, as --engine slurm writes it.")
    ],
    element: Annotated[int, typer.Argument(metavar="N", help="Which element of the array this is, from 0.")],
) -> None:
    """Run one element of an array job; `--engine slurm` gives these commands to Slurm."""
    TaskFolder.at(tasks).run(element)
