"""The commands that compare a work folder with its manifests: `verify` and `reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.addresses import is_address
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.commands.engine_options import EngineOptions
from gristmill.pipelines.commands.option_groups import with_option_groups
from gristmill.pipelines.recipe_file import validate
from gristmill.pipelines.remote_copies import manifest_folder, verify_address
from gristmill.pipelines.reproduce import reproduce as reproduce_stage
from gristmill.pipelines.stage_list import stages_of
from gristmill.pipelines.verify import verify as verify_folder


def verify(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A stage's folder or a work folder, or the address of one.")
    ],
) -> None:
    """Compare files, fingerprints and links with the manifests. Exit code 1 if any differ."""
    found = verify_address(folder) if is_address(folder) else verify_folder(Path(folder))
    for line in found.lines:
        print(line)
    if found.wrong:
        raise InputError("\n".join(found.wrong))


@with_option_groups
def reproduce(
    manifest: Annotated[
        str, typer.Argument(metavar="MANIFEST", help="A stage's manifest.json or its folder, or the address of one.")
    ],
    engine: EngineOptions,
    workdir: Annotated[
        Path | None, typer.Option(help="Where to rebuild it (default: work/reproduce-FINGERPRINT).")
    ] = None,
) -> None:
    """Rebuild a stage from its manifest and report whether every byte is identical."""
    with manifest_folder(manifest) as folder:
        _reproduce(folder, engine, workdir)


def _reproduce(folder: Path, engine: EngineOptions, workdir: Path | None) -> None:
    original = read_manifest(folder)
    stages = stages_of(validate(original.origin["recipe"], str(folder / MANIFEST_NAME)))
    target = workdir or Path("work") / f"reproduce-{original.fingerprint[:12]}"
    result = reproduce_stage(folder, target, stages, engine.open(Reporter.to_terminal(), target))
    for line in result.libraries:
        print(f"library {line}")
    if result.differences:
        raise InputError("differs:\n" + "\n".join(result.differences))
    print(f"identical: {result.files} files")
