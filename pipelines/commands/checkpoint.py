"""The commands that take a checkpoint: `gristmill evaluate --checkpoint`, `generate` and `export`.

torch and lm-eval take seconds to load, so each command loads what it needs when it is called."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.evaluation.config import EvaluateConfig, SamplingConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.recipe_file import validate_config

CheckpointOption = Annotated[
    Path, typer.Option(metavar="DIR", help="A checkpoint, a run's folder (its newest), or a folder of transformers.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Needed if none stands beside the checkpoint.")
]


def evaluate_checkpoint(
    checkpoint: Path,
    settings: dict[str, Any],
    output: Path | None,
    tokenizer: Path | None,
    corpus: Path | None,
    every: int | None,
    parts: tuple[int, int],
    download: bool,
    include_path: Path | None,
) -> None:
    """Scores a checkpoint, or `every` n-th of a run, without a recipe and prints the table. settings: fields of
    EvaluateConfig. parts: the tensor ranks and pipeline stages of one copy. Raises InputError or RecipeError."""
    from gristmill.evaluation.commands import ModelParallel, evaluate_series
    from gristmill.evaluation.commands import evaluate_checkpoint as evaluate_one
    from gristmill.evaluation.run import EvaluationPaths
    from gristmill.evaluation.workdir import CheckpointPaths, Workdir
    from gristmill.training.processes import RankInfo

    config = validate_config(EvaluateConfig, {**settings, "samples": 0})
    folder, reporter = output or Path("work/evaluate"), Reporter.to_terminal()
    data = None if config.data is None else Path(config.data)
    held_out = None if corpus is None else Workdir(corpus).held_out_corpus()
    if corpus is not None and held_out is None:
        raise InputError(f"{corpus}: the stages curate and index are not complete here; name a run's work folder")
    paths = EvaluationPaths(folder, data, held_out, folder / "cache", download, include_path)
    source = CheckpointPaths(checkpoint, tokenizer)
    if every is not None:
        evaluate_series(source, paths, config, reporter, every)
        print(f"{folder / 'curve.svg'}, {folder / 'curve.json'}")
        return
    rank = RankInfo.from_environment()
    evaluate_one(source, paths, config, reporter, rank, ModelParallel(*parts))
    if rank.rank == 0:
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
    from gristmill.evaluation.commands import generate_text
    from gristmill.evaluation.scoring.generate import GenerationSettings
    from gristmill.evaluation.workdir import CheckpointPaths

    if not prompt:
        raise RecipeError("--prompt is empty; give some text to go on from")
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
    begun = False

    def show(_: int, text: str) -> None:
        nonlocal begun
        sys.stdout.write(text if begun else prompt + text)
        sys.stdout.flush()
        begun = True

    generation = GenerationSettings(tokens, sampling, tuple(stop or ()))
    generate_text(CheckpointPaths(checkpoint, tokenizer), [prompt], generation, stream=show)
    sys.stdout.write("\n" if begun else f"{prompt}\n")


def export(
    checkpoint: CheckpointOption,
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for config, safetensors and tokenizer.")],
    tokenizer: TokenizerOption = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    scores: Annotated[Path | None, typer.Option(metavar="DIR", help="Results for the model card.")] = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads, with a model card that tells its provenance."""
    from gristmill.evaluation.models.export import DTYPES, export_checkpoint, require_empty

    if precision not in DTYPES:
        raise RecipeError(f"--precision {precision}: there are {', '.join(DTYPES)}")
    require_empty(output)
    print(f"{output}: {export_checkpoint(checkpoint, output, tokenizer, precision, scores)}")


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="config.json, safetensors and a tokenizer.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the checkpoint and tokenizer.")],
) -> None:
    """Read a folder of transformers as a checkpoint, to evaluate or to train on. Nothing is downloaded."""
    from gristmill.evaluation.models.export import import_checkpoint, require_empty

    require_empty(output)
    print(import_checkpoint(folder, output))


def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A folder of results.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another, asked the same questions.")],
) -> None:
    """Two models on the same questions: which is better, or is it luck?"""
    from gristmill.evaluation.results.compare import compare_folders, comparison_markdown

    print(comparison_markdown(compare_folders(first, second)))
