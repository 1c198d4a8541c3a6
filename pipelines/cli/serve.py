"""`gristmill serve`: an OpenAI-compatible server of one model."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.cli.checkpoint import CheckpointOption, GeneratingModel
from gristmill.pipelines.cli.options import with_option_groups
from gristmill.pipelines.recipes.recipe_file import validate_config

TOKEN_VARIABLE = "GRISTMILL_API_TOKEN"


@dataclass(frozen=True)
class AddressOptions:
    """Options of the address."""

    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"A file with the token of requests (default: {TOKEN_VARIABLE})."),
    ] = None


@dataclass(frozen=True)
class ServedOptions:
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
    address: AddressOptions,
    served: ServedOptions,
    model: GeneratingModel,
) -> None:
    """Serve a model over HTTP with a page to talk to it and OpenAI's endpoints, until Ctrl-C or SIGTERM.

    Under torchrun the model is sharded over the processes, of which the first listens."""
    try:
        from gristmill.evaluation.inference.server.server import ServerOptions, serve  # the extra `serve`
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    from gristmill.evaluation.inference.load import DraftOptions, ModelParallel, Ranks
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
