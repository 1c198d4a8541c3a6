"""The commands of the first hour: `gristmill init` writes a recipe of a folder, `gristmill chat` talks to the model."""

import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter, print_rows
from gristmill.pipelines.cli.options import with_option_groups


@dataclass(frozen=True)
class DialOptions:
    """The size of the run: one of these (default: 30 minutes)."""

    minutes: Annotated[float | None, typer.Option(min=0.5, help="How long the whole run may take.")] = None
    depth: Annotated[int | None, typer.Option(min=1, max=48, help="Layers of the model; all else follows.")] = None
    budget: Annotated[float | None, typer.Option(min=1e9, help="Floating-point operations of training, 1e15.")] = None


@with_option_groups
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of your files.")],
    size: DialOptions,
    price: Annotated[float | None, typer.Option(min=0, help="Price of this machine an hour, for the forecast.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the recipe (default: the folder's).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recipe of this name.")] = False,
) -> None:
    """Look at a folder of your files and write a commented recipe that runs: NAME.yaml in the current folder."""
    if sum(given is not None for given in (size.minutes, size.depth, size.budget)) > 1:
        raise RecipeError("give one of --minutes, --depth and --budget: each decides the size of the run")
    chosen = recipe_name(name or folder.resolve().name)
    path = Path(f"{chosen}.yaml")
    if path.exists() and not overwrite:
        raise RecipeError(f"{path} exists; give another --name, or --overwrite it")
    from gristmill.pipelines.init.first_look import write_first_recipe  # numba, and torch for the rate, load in seconds
    from gristmill.pipelines.init.recipe import duration

    choice = write_first_recipe(folder, path, chosen, size, Reporter.to_terminal(), partial(print, flush=True))
    stages = [(stage, duration(seconds)) for stage, seconds in choice.seconds.items()]
    print_rows([("stage", "forecast"), *stages, ("all", duration(choice.total_seconds))])
    cost = "" if price is None else f", costs {price * choice.total_seconds / 3600:.2f} at {price:g} an hour"
    print(
        f"{choice.size.parameters / 1e6:.2f}M parameters, {choice.why}\n"
        f"{path}: takes about {choice.total_seconds / 60:.1f} minutes{cost}; now: gristmill run {path}"
    )


def recipe_name(text: str) -> str:
    """A name that recipes and work folders take: "My Notes!" -> my_notes."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:60]
    return name or "corpus"


def chat(
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Checkpoint, run or work folder (default: the newest).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Default: the model's own, else 0.8.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 200,
    system: Annotated[str, typer.Option(help="The system prompt, for models with a chat template.")] = "",
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
) -> None:
    """Talk to a model in the terminal; a line is a turn, an empty line or Ctrl-D ends. A model without a chat template
    goes on with what you write."""
    folder = newest_run() if checkpoint is None else train_folder(checkpoint)
    from gristmill.evaluation.inference.config import SamplingConfig
    from gristmill.pipelines.recipes.recipe_file import validate_config

    validate_config(SamplingConfig, {"temperature": temperature or 0.0, "seed": seed})
    from gristmill.evaluation.commands import Conversation, load_chat  # torch takes seconds to load

    conversation: Conversation = load_chat(folder, system, temperature, tokens, seed)
    print(f"{conversation.name}; an empty line ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            return
        conversation.answer(line, _write)
        print()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def newest_run() -> Path:
    """The train folder of the work folder that was trained last, below ./work. Raises InputError if there is none."""
    runs = sorted(Path("work").glob("*/train"), key=lambda path: os.stat(path).st_mtime)
    if not runs:
        raise InputError("work: no trained model here; name a checkpoint, or run `gristmill run RECIPE` first")
    return runs[-1]


def train_folder(path: Path) -> Path:
    """WORKDIR/train of a work folder; other folders as they are."""
    return path / "train" if (path / "train" / "model.json").is_file() else path
