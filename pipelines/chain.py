"""The stages in the order in which they run."""

from gristmill.pipelines.stage import Stage
from gristmill.pipelines.stages import curate, evaluate, index, report, tokenizer, train

STAGES: tuple[Stage, ...] = (
    curate.STAGE,
    tokenizer.STAGE,
    index.STAGE,
    train.STAGE,
    evaluate.STAGE,
    report.STAGE,
)
