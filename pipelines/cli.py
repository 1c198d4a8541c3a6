"""The command line. Every command parses its arguments, calls one function and prints the result."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.disk_errors import disk_trouble
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.commands.checkpoint import compare, export, generate, import_
from gristmill.pipelines.commands.corpus import signatures_app, similar_command, why
from gristmill.pipelines.commands.data import data_app
from gristmill.pipelines.commands.layout import calibrate, layout
from gristmill.pipelines.commands.profiles import profiles_app
from gristmill.pipelines.commands.stage_options import WorkersOption
from gristmill.pipelines.commands.stages import add_stage_command, check, evaluate, plan, run, tokenizer_app, train
from gristmill.pipelines.commands.thresholds import decide, explore
from gristmill.pipelines.console import print_error
from gristmill.pipelines.kernel_cache import damaged_kernels
from gristmill.pipelines.reproduce import reproduce as reproduce_stage
from gristmill.pipelines.schema import recipe_schema
from gristmill.pipelines.stage_list import STAGES
from gristmill.pipelines.verify import verify as verify_folder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pretraining pipeline: from raw text to an evaluated model.",
)

INTERRUPTED = "interrupted; finished work is kept, run the same command to resume"


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 success, 1 failure, 2 invalid command or recipe. User errors show no traceback."""
    try:
        app(args=arguments)
    except RecipeError as error:
        _exit(error, 2)
    except InputError as error:
        _exit(error, 1)
    except OSError as error:
        if (message := disk_trouble(error)) is None:
            raise
        _exit(message, 1)
    except MemoryError:
        _exit("out of memory; finished work is kept: run the same command with fewer --workers", 1)
    except Exception as error:
        if (message := damaged_kernels(error)) is None:
            raise
        _exit(message, 1)
    except SystemExit as error:
        if (interrupt := _keyboard_interrupt(error)) is None:
            raise
        _exit(str(interrupt) or INTERRUPTED, 130)


def _keyboard_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt behind typer's SystemExit, if any; training's has a message about what was saved."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _exit(error: object, code: int) -> None:
    print_error(error)
    sys.exit(code)


def stage_script(name: str) -> None:
    """Entry point of `python -m gristmill.pipelines.stages.NAME RECIPE`."""
    main([name, *sys.argv[1:]])


app.command()(run)
for _stage in ("curate", "index", "report"):
    add_stage_command(_stage, app, _stage)
app.command()(train)
app.command()(evaluate)
app.command()(plan)
app.command()(check)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A stage's folder or a work folder.")],
) -> None:
    """Compare files, fingerprints and links with the manifests. Exit code 1 if any differ."""
    found = verify_folder(folder)
    for line in found.lines:
        print(line)
    if found.wrong:
        raise InputError("\n".join(found.wrong))


@app.command()
def reproduce(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="A stage's manifest.json or its folder.")],
    workdir: Annotated[
        Path | None, typer.Option(help="Where to rebuild it (default: work/reproduce-FINGERPRINT).")
    ] = None,
    workers: WorkersOption = 2,
) -> None:
    """Rebuild a stage from its manifest and report whether every byte is identical."""
    folder = manifest.parent if manifest.name == MANIFEST_NAME else manifest
    target = workdir or Path("work") / f"reproduce-{read_manifest(folder).fingerprint[:12]}"
    result = reproduce_stage(manifest, target, STAGES, workers, Reporter.to_terminal())
    for line in result.libraries:
        print(f"library {line}")
    if result.differences:
        raise InputError("differs:\n" + "\n".join(result.differences))
    print(f"identical: {result.files} files")


for _command in (why, decide, explore, generate, export, compare, layout, calibrate):
    app.command()(_command)
app.command("import")(import_)
app.command("similar")(similar_command)

app.add_typer(data_app, name="data")
app.add_typer(signatures_app, name="signatures")
app.add_typer(profiles_app, name="profiles")
app.add_typer(tokenizer_app, name="tokenizer")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


if __name__ == "__main__":
    main()
