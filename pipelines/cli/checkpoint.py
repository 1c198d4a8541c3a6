"""The commands for checkpoints: `evaluate --checkpoint`, `generate`, `serve`, `export`, `import` and
`compare`.

Importing torch and lm-eval takes seconds, so each command imports what it needs when called."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.options import output_file, with_option_groups
from gristmill.pipelines.recipes.recipe_file import validate_config
from gristmill.pipelines.workdir.remote import fetched, local_folder

if TYPE_CHECKING:
    from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
    from gristmill.evaluation.inference.load_model import Ranks
    from gristmill.evaluation.inference.workdir import CheckpointPaths

CheckpointOption = Annotated[
    Path, typer.Option(metavar="DIR", help="A checkpoint, a run (its newest checkpoint), or a Hugging Face folder.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Tokenizer folder (default: the one of the checkpoint's run).")
]


OffloadOption = Annotated[
    str,
    typer.Option(help="none, host or disk: where the weights of the layers lie; each comes in as it computes."),
]


@dataclass(frozen=True)
class EvaluatedModel:
    """Options of the model of `gristmill evaluate --checkpoint`."""

    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_folder, help="Evaluate this checkpoint or address without a recipe."),
    ] = None
    tokenizer: TokenizerOption = None
    every: Annotated[
        int | None, typer.Option(min=1, help="Evaluate every n-th step's checkpoint of a run; draws a curve.")
    ] = None
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32"
    quantization: Annotated[
        str, typer.Option(help="none, int8, int4 or smoothquant (reports the change in scores).")
    ] = "none"
    offload_parameters: OffloadOption = "none"
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per forward pass (default: by device).")] = (
        None
    )
    tensor: Annotated[int, typer.Option(min=1, help="Under torchrun: tensor-parallel ranks.")] = 1
    pipeline: Annotated[int, typer.Option(min=1, help="Under torchrun: pipeline stages.")] = 1
    expert: Annotated[int, typer.Option(min=1, help="Under torchrun: ranks the experts are divided over.")] = 1


@dataclass(frozen=True)
class TaskOptions:
    """Options of the tasks of `gristmill evaluate --checkpoint`."""

    tasks: Annotated[str, typer.Option(help="lm-eval task names or YAML files, comma-separated.")] = ""
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Few-shot examples per question.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of documents per task.")] = None
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the tasks' data files.")] = None
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local_folder, help="Work folder (or its address), for the held-out tasks."),
    ] = None
    download: Annotated[bool, typer.Option("--download", help="Allow lm-eval's tasks to download data.")] = False
    include_path: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of task files (YAML).")] = None


def evaluation_config(model: EvaluatedModel, tasks: TaskOptions) -> EvaluateConfig:
    """Raises RecipeError for a wrong option."""
    names = [name.strip() for name in tasks.tasks.split(",")]
    if not all(names):
        raise RecipeError("--tasks needs names separated by single commas, such as --tasks piqa,wic")
    files = data_folder(tasks.data)
    return validate_config(
        EvaluateConfig,
        {
            "tasks": names,
            "num_fewshot": tasks.num_fewshot,
            "limit": tasks.limit,
            "data": None if files is None else str(files),
            "precision": model.precision,
            "quantization": model.quantization,
            "offload_parameters": model.offload_parameters,
            "batch_tokens": model.batch_tokens,
            "num_continuations": 0,
        },
    )


def evaluate_checkpoint(model: EvaluatedModel, tasks: TaskOptions, output: Path | None) -> None:
    """Evaluates a checkpoint, or a series of a run, and prints the table. Raises InputError or RecipeError."""
    from gristmill.evaluation.commands import evaluate_checkpoint as evaluate_one
    from gristmill.evaluation.commands import evaluate_series
    from gristmill.evaluation.inference.load_model import ModelParallel
    from gristmill.evaluation.inference.workdir import CheckpointPaths, Workdir
    from gristmill.evaluation.run import EvaluationPaths
    from gristmill.training.launch.processes import RankInfo

    assert model.checkpoint is not None
    config = evaluation_config(model, tasks)
    folder, reporter = output or Path("work/evaluate"), Reporter.to_terminal()
    data = None if config.data is None else Path(config.data)
    held_out = None if tasks.corpus is None else Workdir(fetched(tasks.corpus)).held_out_corpus()
    if tasks.corpus is not None and held_out is None:
        raise InputError(f"{tasks.corpus}: the stages curate and index are not complete here; name a run's work folder")
    paths = EvaluationPaths(folder, data, held_out, folder / "cache", tasks.download, tasks.include_path)
    source = CheckpointPaths(fetched(model.checkpoint), model.tokenizer)
    if model.every is not None:
        evaluate_series(source, paths, config, reporter, model.every)
        print(f"{folder / 'curve.svg'}, {folder / 'curve.json'}")
        return
    rank = RankInfo.from_environment()
    evaluate_one(source, paths, config, reporter, rank, ModelParallel(model.tensor, model.pipeline, model.expert))
    if rank.rank == 0:
        print((folder / "table.md").read_text("utf-8"))


def data_folder(given: Path | None) -> Path | None:
    """The folder of the tasks' data files: the option, else GRISTMILL_SHARED_DATA, else None."""
    named = os.environ.get("GRISTMILL_SHARED_DATA")
    return given or (Path(named) if named else None)


@dataclass(frozen=True)
class SamplingOptions:
    """Options of `gristmill generate` by the names of SamplingConfig; None: the model's generation_config.json."""

    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy decoding (default: the model's own, else 0).")
    ] = None
    top_k: Annotated[int | None, typer.Option(min=1)] = None
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None
    min_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Smallest share of the likeliest token's probability.")
    ] = None
    repetition_penalty: Annotated[float | None, typer.Option(min=0.0)] = None
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0


@dataclass(frozen=True)
class PromptFileOptions:
    """Options of `gristmill generate` for a file of prompts."""

    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with a prompt each; results go to --output.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=output_file, help="A new file of JSON lines, of --prompts.")
    ] = None
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once, of --prompts (default: by device).")
    ] = None


@dataclass(frozen=True)
class StopOptions:
    """Options of `gristmill generate` on the end of a continuation."""

    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 128
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None


@dataclass(frozen=True)
class GenerationModelOptions:
    """Options of the model of `gristmill generate` and `gristmill serve`."""

    tokenizer: TokenizerOption = None
    tensor: Annotated[int, typer.Option(min=1, help="Under torchrun: tensor-parallel ranks.")] = 1
    pipeline: Annotated[int, typer.Option(min=1, help="Under torchrun: pipeline stages.")] = 1
    expert: Annotated[int, typer.Option(min=1, help="Under torchrun: ranks the experts are divided over.")] = 1
    offload_parameters: OffloadOption = "none"
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens to guess at a time and read in one pass, from the text so far; 0: none."),
    ] = 0
    draft_model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A smaller model of the same tokenizer that guesses --draft-tokens instead."),
    ] = None


@with_option_groups
def generate(
    checkpoint: CheckpointOption,
    model: GenerationModelOptions,
    sampling: SamplingOptions,
    end: StopOptions,
    file: PromptFileOptions,
    prompt: Annotated[str | None, typer.Option(help="The prompt text.")] = None,
) -> None:
    """Generate text from a prompt, streamed to the terminal, or from a file of prompts."""
    from gristmill.evaluation.commands import generate_text
    from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
    from gristmill.evaluation.inference.load_model import DraftOptions, ModelParallel, Ranks
    from gristmill.evaluation.inference.workdir import CheckpointPaths
    from gristmill.training.launch.processes import RankInfo

    offload = validate_config(EvaluateConfig, {"offload_parameters": model.offload_parameters}).offload_parameters
    parallel = ModelParallel(model.tensor, model.pipeline, model.expert)
    draft_options = DraftOptions(model.draft_tokens, model.draft_model, model.tokenizer)
    ranks = Ranks(RankInfo.from_environment(), parallel, offload, draft_options)
    source = CheckpointPaths(checkpoint, model.tokenizer)
    stated = {name: value for name, value in asdict(sampling).items() if value is not None}
    config = validate_config(SamplingConfig, stated)
    generation = GenerationSettings(end.tokens, config, tuple(end.stop or ()))
    if prompt is None or file.prompts is not None:
        _generate_to_file(source, file, generation, ranks, both=prompt is not None)
        return
    if file.output is not None:
        raise RecipeError("--output is for --prompts; the text of --prompt is printed")
    if not prompt:
        raise RecipeError("--prompt is empty; give some text to continue")
    begun = False

    def show(_: int, text: str) -> None:
        nonlocal begun
        sys.stdout.write(text if begun else prompt + text)
        sys.stdout.flush()
        begun = True

    generate_text(source, [prompt], generation, show, ranks)
    if ranks.rank.rank == 0:
        sys.stdout.write("\n" if begun else f"{prompt}\n")


def _generate_to_file(
    source: "CheckpointPaths",
    file: PromptFileOptions,
    settings: "GenerationSettings",
    ranks: "Ranks",
    both: bool,
) -> None:
    from gristmill.evaluation.commands import generate_to_file
    from gristmill.evaluation.inference.generate.prompts import PromptFile

    if file.prompts is None or both:
        raise RecipeError("give --prompt TEXT, or --prompts FILE with --output FILE")
    if file.output is None:
        raise RecipeError("--prompts needs --output FILE, a new file for the results")
    files = PromptFile(file.prompts, file.output)
    errors = generate_to_file(source, files, settings, Reporter.to_terminal(), file.sequences, ranks)
    if ranks.rank.rank:
        return
    if errors:
        raise InputError(
            f"{file.prompts}: {errors} records have errors, which stand in {file.output} in the field error; "
            "all other records are done"
        )
    print(file.output)


def export(
    checkpoint: CheckpointOption,
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for config, safetensors and tokenizer.")],
    tokenizer: TokenizerOption = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16 (default: that of the imported folder, else fp32).")
    ] = None,
    scores: Annotated[Path | None, typer.Option(metavar="DIR", help="Evaluation results for the model card.")] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Such as Phi3ForCausalLM; by default what was imported, or the first that fits."
        ),
    ] = None,
) -> None:
    """Export a checkpoint to a Hugging Face transformers folder, with a model card that records its provenance."""
    from gristmill.evaluation.import_export import DTYPES, export_checkpoint, require_empty

    if precision is not None and precision not in DTYPES:
        raise RecipeError(f"--precision {precision}: choose one of {', '.join(DTYPES)}")
    require_empty(output)
    print(f"{output}: {export_checkpoint(checkpoint, output, tokenizer, precision, scores, architecture)}")


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A Hugging Face folder, a GGUF file, a LoRA adapter, or a Megatron checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the checkpoint and tokenizer.")],
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a LoRA adapter: the Hugging Face folder it was trained on.")
    ] = None,
) -> None:
    """Convert a Hugging Face, GGUF, LoRA or Megatron checkpoint to one to evaluate or train. Downloads nothing."""
    from gristmill.evaluation.import_export import import_checkpoint, require_empty

    require_empty(output)
    print(import_checkpoint(folder, output, base))


def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A results folder.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one, with the same tasks.")],
) -> None:
    """Compare two models' evaluation results on the same questions, with a paired significance test."""
    from gristmill.evaluation.results.compare import compare_folders, comparison_markdown

    print(comparison_markdown(compare_folders(first, second)))


# `gristmill serve`: an OpenAI-compatible server of one model.

TOKEN_VARIABLE = "GRISTMILL_API_TOKEN"


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and the token that it asks for."""

    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"A file with the token of requests (default: {TOKEN_VARIABLE})."),
    ] = None


@dataclass(frozen=True)
class ServingOptions:
    """Options of the model and the limits."""

    model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in requests (default: the checkpoint's).")
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template of chats (default: the tokenizer's, or plain).")
    ] = None
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32"
    quantization: Annotated[str, typer.Option(help="none, int8, int4 or smoothquant.")] = "none"
    sequences: Annotated[int | None, typer.Option(min=1, help="Sequences that run at once (default: by device).")] = (
        None
    )
    cache_gib: Annotated[
        float | None,
        typer.Option(
            min=0, help="Memory of the key/value cache in GiB, of each process (default: half of the free memory)."
        ),
    ] = None
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run or wait; more get status 429.")] = 1024
    stop_seconds: Annotated[int, typer.Option(min=0, help="Time for running requests to end after SIGTERM.")] = 30
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A site whose pages may ask, such as https://chat.example; several times."),
    ] = None


@with_option_groups
def serve(
    checkpoint: CheckpointOption,
    address: ListenOptions,
    served: ServingOptions,
    model: GenerationModelOptions,
) -> None:
    """Serve a model over HTTP with a page to talk to it and OpenAI's endpoints, until Ctrl-C or SIGTERM.

    Under torchrun the model is sharded over the processes, of which the first listens."""
    try:
        from gristmill.evaluation.inference.server.server import ServerOptions, serve  # the extra `serve`
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    from gristmill.evaluation.inference.load_model import DraftOptions, ModelParallel, Ranks
    from gristmill.evaluation.inference.workdir import CheckpointPaths
    from gristmill.training.launch.processes import RankInfo

    fields = {"precision": served.precision, "quantization": served.quantization}
    config = validate_config(EvaluateConfig, fields | {"offload_parameters": model.offload_parameters})
    options = ServerOptions(
        address.host,
        address.port,
        _token(address.token_file),
        served.model_name,
        served.chat_template,
        served.sequences,
        None if served.cache_gib is None else int(served.cache_gib * 2**30),
        served.max_requests,
        served.stop_seconds,
        tuple(served.cors_origin or ()),
    )
    draft_options = DraftOptions(model.draft_tokens, model.draft_model, model.tokenizer)
    parallel = ModelParallel(model.tensor, model.pipeline, model.expert)
    ranks = Ranks(RankInfo.from_environment(), parallel, drafts=draft_options)
    serve(CheckpointPaths(checkpoint, model.tokenizer), config, options, Reporter.to_terminal(), ranks)


def _token(file: Path | None) -> str | None:
    """The token; None if there is neither a file nor the variable."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE)
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as ASCII text ({error}); write the token into it") from error
