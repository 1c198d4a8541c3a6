"""The stage `train`: indexed data to checkpoints, in one process or under torchrun."""

from typing import Any

from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.data_pipeline.provenance.canonical import fingerprint
from gristmill.pipelines.config import Recipe, identity
from gristmill.pipelines.stage import Stage, StageContext
from gristmill.training.planner.command import resolve_layout


def config(recipe: Recipe) -> dict[str, Any]:
    sampling = identity(recipe.index)  # packing and blend decide samples, not the indexed files
    return {
        "model": identity(recipe.model),
        "train": identity(recipe.train),
        "sampling": sampling,
        "seed": recipe.seed,
    }


def run(context: StageContext) -> dict[str, Any]:
    """Writes model.json, metrics.jsonl and checkpoints/; the facts are steps, tokens, losses and parameters."""
    # Loaded here: torch takes seconds, which `gristmill plan` and the other stages need not wait for.
    from gristmill.training.parallel.layout import check_layout
    from gristmill.training.processes import Place, joined
    from gristmill.training.run import Run

    recipe, model, train = context.recipe, context.recipe.model, context.recipe.train
    data = open_data(context)
    place = Place.from_environment()
    rank_order = None
    if train.layout.auto:
        train, rank_order = resolve_layout(model, data.samples.vocab_size, train, place.world_size)
        context.reporter.say(f"train: the planner chose {train.layout.model_dump(mode='json', exclude_defaults=True)}")
    check_layout(model, train, data.samples.vocab_size, place.world_size)
    digest = fingerprint([recipe.model_dump(mode="json"), data.samples.fingerprint])
    with joined(place, train.layout, model, digest, train.watch.timeout_seconds, rank_order) as mesh:
        return Run(model, train, recipe.seed, data, mesh, context.folder, context.reporter).to_the_end()


def open_data(context: StageContext) -> Any:
    """The training samples, and the held-out ones where there are enough for one."""
    from gristmill.training.run import Data  # as above

    recipe, folder = context.recipe, context.inputs["index"]
    dataset = read_dataset(folder)
    samples = open_samples(folder, "train", recipe.model.context, recipe.seed, recipe.index)
    num_samples = -(-recipe.train.tokens // recipe.model.context)
    samples.check_budget(num_samples)
    context.reporter.say(f"train: will draw {samples.budget(num_samples)}")
    try:
        held_out = open_samples(folder, "validation", recipe.model.context, recipe.seed, recipe.index)
    except InputError as error:
        context.reporter.say(f"train: no validation, because {error}")
        held_out = None
    counts = {source.name: source.splits.get("validation") for source in dataset.sources}
    bytes_per_token = {name: count.bytes / count.tokens for name, count in counts.items() if count and count.tokens}
    return Data(samples, held_out, dataset.end_of_document, recipe.index.mask_documents, bytes_per_token)


STAGE: Stage = Stage(
    name="train", code_version=1, inputs=("index",), config=config, run=run, libraries=("torch",), parallel=True
)

if __name__ == "__main__":
    from gristmill.pipelines.cli import stage_script

    stage_script("train")
