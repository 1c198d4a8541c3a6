"""The commands that compare a work folder with its manifests: `verify` and `reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.commands.engine_options import EngineOptions
from gristmill.pipelines.commands.option_groups import with_option_groups
from gristmill.pipelines.recipe_file import validate
from gristmill.pipelines.reproduce import reproduce as reproduce_stage
from gristmill.pipelines.stage_list import stages_of
from gristmill.pipelines.verify import verify as verify_folder


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A stage's folder or a work folder.")],
) -> None:
    """Compare files, fingerprints and links with the manifests. Exit code 1 if any differ."""
    found = verify_folder(folder)
    for line in found.lines:
        print(line)
    if found.wrong:
        raise InputError("\n".join(found.wrong))


@with_option_groups
def reproduce(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="A stage's manifest.json or its folder.")],
    engine: EngineOptions,
    workdir: Annotated[
        Path | None, typer.Option(help="Where to rebuild it (default: work/reproduce-FINGERPRINT).")
    ] = None,
) -> None:
    """Rebuild a stage from its manifest and report whether every byte is identical."""
    folder = manifest.parent if manifest.name == MANIFEST_NAME else manifest
    original = read_manifest(folder)
    stages = stages_of(validate(original.origin["recipe"], str(folder / MANIFEST_NAME)))
    target = workdir or Path("work") / f"reproduce-{original.fingerprint[:12]}"
    result = reproduce_stage(manifest, target, stages, engine.open(Reporter.to_terminal(), target))
    for line in result.libraries:
        print(f"library {line}")
    if result.differences:
        raise InputError("differs:\n" + "\n".join(result.differences))
    print(f"identical: {result.files} files")
