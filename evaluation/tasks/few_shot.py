"""Few-shot examples: their number, the split they come from (not the evaluated one if another exists), their seed."""

from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task

from gristmill.foundation.errors import RecipeError

FEWSHOT_SEED = 1234  # lm-eval's default: the same examples before the same question as there


def set_shots(task: Task, shots: int | None) -> str | None:
    """Sets the number of few-shot examples where the task leaves it open, their split and their seed.

    Returns a note if they come from the evaluated questions. Raises RecipeError if there are too few examples."""
    if task.get_config("num_fewshot") is None or (shots is not None and task.get_config("num_fewshot") != 0):
        task.set_config("num_fewshot", shots or 0)
    wanted = task.get_config("num_fewshot")
    name = task.get_config("task")
    note = None
    if wanted and task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise RecipeError(f"task {name} scores whole texts, which have no few-shot examples; leave --shots out")
    if wanted:
        note = _draw_from_another_split(task, name)
        found = len(task.sampler.df) - (note is not None)
        if wanted > found:
            raise RecipeError(f"task {name} has {found} few-shot examples, {wanted} are requested; lower the shots")
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return note


def _draw_from_another_split(task: Task, name: str) -> str | None:
    """Keeps the task's own split if it is not the evaluated one, else takes the train or validation split; a note if
    there is none. lm-eval removes a question from its own examples if `fewshot_cfg.split` equals `test_split` (also
    None)."""
    config, fewshot = task.config, task.fewshot_cfg
    evaluated = config.test_split or config.validation_split
    chosen = fewshot.split or (
        None if fewshot.samples is not None else config.training_split or config.validation_split
    )
    if fewshot.split is None and fewshot.samples is None and chosen is None:
        chosen = evaluated
    if chosen != evaluated and len(task.sampler.df):
        return None
    others = {
        config.training_split: task.training_docs,
        config.validation_split: task.validation_docs,
    }
    for split, documents in others.items():
        if split is not None and split != evaluated and len(found := list(documents() or ())):
            task.sampler, fewshot.split = _sampler(task, found), split
            return None
    task.sampler, fewshot.split = _sampler(task, list(task.eval_docs)), config.test_split
    return (
        f"{name}: few-shot examples are other questions of the evaluated split, since there is no train or validation "
        "split; no question is its own example"
    )


def _sampler(task: Task, documents: list) -> ContextSampler:
    return type(task.sampler)(documents, rnd=FEWSHOT_SEED)
