"""Where the worked examples before a question come from: never from what is asked, wherever another split exists."""

from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task

from gristmill.foundation.errors import RecipeError

FEWSHOT_SEED = 1234  # lm-eval's default: the same examples before the same question as there


def set_shots(task: Task, shots: int | None) -> str | None:
    """Sets the number of examples where the task leaves it open, whence they come, and the seed they are drawn with.

    Gives a sentence if they come from the questions themselves. Raises RecipeError if there are too few to show."""
    if task.get_config("num_fewshot") is None or (shots is not None and task.get_config("num_fewshot") != 0):
        task.set_config("num_fewshot", shots or 0)
    wanted = task.get_config("num_fewshot")
    name = task.get_config("task")
    said = None
    if wanted and task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise RecipeError(f"task {name} scores whole texts, which have no examples before them; leave --shots out")
    if wanted:
        said = _draw_from_another_split(task, name)
        found = len(task.sampler.df) - (said is not None)
        if wanted > found:
            raise RecipeError(f"task {name} has {found} examples to show and {wanted} are asked for; lower the shots")
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return said


def _draw_from_another_split(task: Task, name: str) -> str | None:
    """The task's own choice stands if it is another split than the one asked. `fewshot_cfg.split` equal to `test_split`
    (both None too) is how lm-eval knows that a question must be taken out of its own examples."""
    config, fewshot = task.config, task.fewshot_cfg
    asked = config.test_split or config.validation_split
    chosen = fewshot.split or (
        None if fewshot.samples is not None else config.training_split or config.validation_split
    )
    if fewshot.split is None and fewshot.samples is None and chosen is None:
        chosen = asked
    if chosen != asked and len(task.sampler.df):
        return None
    others = {
        config.training_split: task.training_docs,
        config.validation_split: task.validation_docs,
    }
    for split, documents in others.items():
        if split is not None and split != asked and len(found := list(documents() or ())):
            task.sampler, fewshot.split = _sampler(task, found), split
            return None
    task.sampler, fewshot.split = _sampler(task, list(task.eval_docs)), config.test_split
    return (
        f"{name}: its few-shot examples are other questions of the split that is asked, for no train or validation "
        "split is here; no question is its own example"
    )


def _sampler(task: Task, documents: list) -> ContextSampler:
    return type(task.sampler)(documents, rnd=FEWSHOT_SEED)
