"""The stage `evaluate`: scores the last checkpoint on the recipe's tasks and generates samples for the report."""

from pathlib import Path
from typing import Any

from gristmill.pipelines.recipes.config import Recipe, identity
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script, task_identity
from gristmill.pipelines.stages.training_data import objective_on_test_split
from gristmill.training.objectives.objective_names import SCORED_BY_TASKS

MAX_SAMPLES = 1000  # of an objective on the corpus; evaluate.limit may lower it


def config(recipe: Recipe) -> dict[str, Any]:
    evaluate = {**identity(recipe.evaluate), "tasks": task_identity(recipe.evaluate.tasks, recipe.evaluate)}
    return {"evaluate": evaluate, "seed": recipe.seed}


def run(context: StageContext) -> dict[str, Any]:
    """Writes results.json, samples/, table.md and generations.json; the metadata is the scores by task."""
    # Imported here: torch and lm-eval take seconds to load, and `gristmill plan` and other stages do not need them.
    from gristmill.evaluation.inference.workdir import CheckpointPaths, HeldOutCorpus, find_checkpoint
    from gristmill.evaluation.run import EvaluationPaths, evaluate_folder
    from gristmill.training.launch.processes import RankInfo, local_device

    checkpoint = find_checkpoint(context.inputs["train"])
    objective = context.recipe.training().train.objective
    if objective not in SCORED_BY_TASKS:
        return _evaluate_objective(context, checkpoint)
    # No request cache: results of another batch may differ in the last digit, and the output must be deterministic.
    data = context.recipe.evaluate.data
    corpus = HeldOutCorpus(context.inputs["curate"], context.inputs["index"], context.recipe.seed)
    rows = evaluate_folder(
        source=CheckpointPaths(checkpoint, context.inputs["tokenizer"]),
        paths=EvaluationPaths(context.folder, None if data is None else Path(data), corpus),
        config=context.recipe.evaluate,
        reporter=context.reporter,
        device=local_device(RankInfo.from_environment()),
    )
    return {
        "checkpoint": checkpoint.name,
        "scores": [score_summary(row) for row in rows],
    }


def _evaluate_objective(context: StageContext, checkpoint: Path) -> dict[str, Any]:
    """Scores the model on the test samples of its own objective: tasks ask a model for the next token."""
    from gristmill.evaluation.objective_scores import evaluate_objective, write_objective_scores  # as above
    from gristmill.training.checkpoint.checkpoint import load_model
    from gristmill.training.launch.processes import RankInfo, local_device

    objective, limit = objective_on_test_split(context), context.recipe.evaluate.limit
    available = objective.num_samples or MAX_SAMPLES
    count = min(limit or available, available)
    model, _ = load_model(checkpoint, local_device(RankInfo.from_environment()))
    context.reporter.info(f"evaluate: {count} samples of the objective; the recipe's tasks are for causal models")
    rows = evaluate_objective(model, objective, count)
    write_objective_scores(context.folder, rows, count)
    return {"checkpoint": checkpoint.name, "scores": [score_summary(row) for row in rows]}


def score_summary(row: Any) -> dict[str, Any]:
    return {"task": row.task, "metric": row.metric, "score": row.score, "error": row.error, "chance": row.chance}


STAGE: Stage = Stage(
    name="evaluate",
    code_version=12,
    inputs=("curate", "tokenizer", "index", "train"),
    config=config,
    run=run,
    sections=("model", "train", "evaluate"),
    libraries=("lm_eval", "torch"),
)

if __name__ == "__main__":
    run_as_script("evaluate")
