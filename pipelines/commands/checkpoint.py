"""The commands that take a checkpoint: `gristmill evaluate --checkpoint`, `generate` and `export`.

torch and lm-eval take seconds to load, so each command loads what it needs when it is called."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import InputError, RecipeError
from gristmill.evaluation.config import EvaluateConfig, SamplingConfig
from gristmill.pipelines.recipe_file import validate_config

CheckpointOption = Annotated[
    Path, typer.Option(metavar="DIR", help="A checkpoint, a run's folder (its newest), or a folder of transformers.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Needed if none stands beside the checkpoint.")
]


def evaluate_checkpoint(
    checkpoint: Path,
    tasks: str,
    shots: int | None,
    limit: int | None,
    output: Path | None,
    tokenizer: Path | None,
    data: Path | None,
    corpus: Path | None,
) -> None:
    """Scores a checkpoint without a recipe and prints the table. Raises InputError or RecipeError."""
    from gristmill.evaluation.run import Corpus, Places, evaluate_folder

    config = validate_config(EvaluateConfig, {"tasks": tasks.split(","), "shots": shots, "limit": limit, "samples": 0})
    folder = output or Path("work/evaluate")
    held_out = Corpus(corpus / "curate", corpus / "index", seed=0) if corpus else None
    places = Places(folder, data_folder(data), held_out, cache=folder / "cache")
    evaluate_folder(checkpoint, tokenizer, places, config, Reporter.to_terminal())
    print((folder / "table.md").read_text("utf-8"))


def data_folder(given: Path | None) -> Path | None:
    """Where the files of the named tasks lie: the option, or GRISTMILL_SHARED_DATA, or nowhere."""
    named = os.environ.get("GRISTMILL_SHARED_DATA")
    return given or (Path(named) if named else None)


def generate(
    checkpoint: CheckpointOption,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    tokenizer: TokenizerOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most so many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
) -> None:
    """Go on from a prompt; the text appears as it is drawn."""
    from gristmill.evaluation.generate import generate as continue_prompts
    from gristmill.evaluation.load import load_subject

    if not prompt:
        raise RecipeError("--prompt is empty; give some text to go on from")
    subject = load_subject(checkpoint, tokenizer, EvaluateConfig())
    ids = [subject.codec.end_of_document, *subject.codec.encode(prompt)]
    sampling = validate_config(
        SamplingConfig,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
        },
    )
    sys.stdout.write(prompt)
    continue_prompts(
        subject.backbone, subject.codec, [ids], tokens, sampling, stop or [], stream=lambda _, text: _show(text)
    )
    sys.stdout.write("\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def export(
    checkpoint: CheckpointOption,
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for config, safetensors and tokenizer.")],
    tokenizer: TokenizerOption = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads."""
    from gristmill.evaluation.huggingface import write_huggingface
    from gristmill.evaluation.load import find_tokenizer, newest_step
    from gristmill.training.checkpoint import load_model, read_card

    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output}: not empty; name a new folder")
    step = newest_step(checkpoint)
    model, _ = load_model(step)
    folder = tokenizer or find_tokenizer(step)
    name = write_huggingface(output, model, read_card(step)["end_of_document"], folder)
    print(f"{output}: {name}, from {step}")
