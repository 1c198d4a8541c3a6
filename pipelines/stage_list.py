"""The stages in execution order."""

from dataclasses import replace

from gristmill.pipelines.config import Recipe
from gristmill.pipelines.stage import Stage
from gristmill.pipelines.stages.curate import STAGE as CURATE
from gristmill.pipelines.stages.evaluate import STAGE as EVALUATE
from gristmill.pipelines.stages.index import STAGE as INDEX
from gristmill.pipelines.stages.report import STAGE as REPORT
from gristmill.pipelines.stages.tokenizer import STAGE as TOKENIZER
from gristmill.pipelines.stages.train import STAGE as TRAIN

STAGES: tuple[Stage, ...] = (CURATE, TOKENIZER, INDEX, TRAIN, EVALUATE, REPORT)
CORPUS_STAGES = ("curate", "index")


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """All stages; without those of the corpus where the recipe has no sources."""
    if recipe.sources:
        return STAGES
    return tuple(
        replace(stage, inputs=tuple(name for name in stage.inputs if name not in CORPUS_STAGES))
        for stage in STAGES
        if stage.name not in CORPUS_STAGES
    )
