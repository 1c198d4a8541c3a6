"""Digests of the sources that decide the output bytes of each stage, recorded beside the stage's code version.

`python tests/support/stage_sources.py` records the current ones in tests/support/stage_sources.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.annotate.annotate import ANNOTATE_VERSION
from gristmill.foundation.source_digest import code_digest, source_files
from gristmill.pipelines.stage_list import STAGES

ROOT = Path(__file__).parent.parent.parent
RECORD = Path(__file__).with_suffix(".json")
COMMAND = "python tests/support/stage_sources.py"
# Modules on which no output byte depends: they print, explain errors, start processes or describe stages. The values of
# the config are part of a stage's fingerprint, so the recipe's class is left out too.
NOT_IN_OUTPUT = frozenset(
    [f"gristmill.foundation.{name}" for name in ("disk_errors", "errors", "nearest_name", "progress")]
    + [f"gristmill.foundation.engine.{name}" for name in ("local", "worker_pool")]
    + [f"gristmill.pipelines.{name}" for name in ("cli", "config", "stage")]
)


def current() -> dict[str, dict[str, Any]]:
    """Stage -> {code_version, sources: digest}; `annotate` is the cached first step of `curate`."""
    versions = {"annotate": ANNOTATE_VERSION} | {stage.name: stage.code_version for stage in STAGES}
    return {
        name: {"code_version": version, "sources": _digest(_module(name))} for name, version in sorted(versions.items())
    }


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text("utf-8"))


def _module(stage: str) -> str:
    return "data_pipeline.annotate.annotate" if stage == "annotate" else f"pipelines.stages.{stage}"


def _digest(module: str) -> str:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    files = source_files(f"gristmill.{module}", path, NOT_IN_OUTPUT)
    folders = {file.parent for file in files.values()}
    tables = sorted(table for folder in folders for suffix in ("txt", "npz") for table in folder.glob(f"*.{suffix}"))
    digests = [hashlib.sha256(table.read_bytes()).hexdigest() for table in tables]
    return hashlib.sha256("\n".join([code_digest(files), *digests]).encode()).hexdigest()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=1) + "\n", "utf-8")
    print(f"{RECORD.relative_to(ROOT)}: the digests of {len(recorded())} stages are recorded")
