"""Rank and world size from the environment variables that torchrun sets."""

import os

from gristmill.foundation.errors import RecipeError


def torchrun_variable(name: str, default: int) -> int:
    """The variable's value. Raises RecipeError if it is not a whole number from 0."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RecipeError(f"{name}={text!r} in the environment is no number of processes; torchrun sets it: unset it")
    return int(text)


def rank_and_world_size() -> tuple[int, int]:
    """(this process's rank, the number of processes); (0, 1) without torchrun.

    Raises RecipeError if the variables contradict each other."""
    rank, world_size = torchrun_variable("RANK", 0), torchrun_variable("WORLD_SIZE", 1)
    if rank >= world_size:
        raise RecipeError(f"RANK={rank} in the environment, but WORLD_SIZE={world_size}; unset both")
    return rank, world_size
