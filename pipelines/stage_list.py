"""The stages in execution order."""

from gristmill.pipelines.stage import Stage
from gristmill.pipelines.stages.curate import STAGE as CURATE
from gristmill.pipelines.stages.evaluate import STAGE as EVALUATE
from gristmill.pipelines.stages.index import STAGE as INDEX
from gristmill.pipelines.stages.report import STAGE as REPORT
from gristmill.pipelines.stages.tokenizer import STAGE as TOKENIZER
from gristmill.pipelines.stages.train import STAGE as TRAIN

STAGES: tuple[Stage, ...] = (CURATE, TOKENIZER, INDEX, TRAIN, EVALUATE, REPORT)
