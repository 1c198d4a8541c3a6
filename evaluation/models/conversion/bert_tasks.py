"""Fine-tuned BERT in transformers: MegatronBertForSequenceClassification, ForMultipleChoice, ForQuestionAnswering,
ForTokenClassification, and the same of the original order of norms (Bert...).

These classes have no head for masked tokens and none for the order of sentences, so those weights are left out, and a
model that is read has neither."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.evaluation.models.conversion.bert import (
    ORIGINAL,
    ORIGINAL_NORMS,
    REARRANGED,
    REARRANGED_NORMS,
    SENTENCE_ORDER,
    read,
    rules,
    unsupported,
    write,
)
from gristmill.evaluation.models.conversion.family import Family, Fields
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.training.model_config import ModelConfig
from gristmill.training.output_config import OutputConfig

OUTPUT_NAME = "output_name"  # in config.json: the output's name in our model.outputs


@dataclass(frozen=True)
class Task:
    """A class of transformers by its ending, and the output that it holds. linear: its name there. fits: whether an
    output over `over` is one of this task."""

    ending: str
    linear: str
    over: Literal["pooled", "tokens"]
    default_name: str
    fits: Callable[[OutputConfig], bool]

    def problem(self, config: ModelConfig) -> list[str]:
        own = task_outputs(config)
        if len(own) != 1 or own[0].over != self.over or not self.fits(own[0]):
            return [f"outputs={[output.model_dump() for output in config.outputs]}"]
        return []


TASKS = (
    Task("ForMultipleChoice", "classifier", "pooled", "choice", lambda output: output.size == 1),
    Task("ForSequenceClassification", "classifier", "pooled", "classes", lambda output: output.size > 1),
    Task(
        "ForQuestionAnswering",
        "qa_outputs",
        "tokens",
        "span",
        lambda output: output.size == 2 and output.name == "span",
    ),
    Task("ForTokenClassification", "classifier", "tokens", "tags", lambda output: True),
)


@dataclass(frozen=True)
class Order:
    """One of the two orders of norms."""

    prefix: str
    model_type: str
    constants: Mapping[str, Any]
    norms: Mapping[str, str]


ORDERS = (
    Order("MegatronBert", "megatron-bert", REARRANGED, REARRANGED_NORMS),
    Order("Bert", "bert", ORIGINAL, ORIGINAL_NORMS),
)


def task_outputs(config: ModelConfig) -> list[OutputConfig]:
    """The outputs beside the sentence order's."""
    return [output for output in config.outputs if output != SENTENCE_ORDER]


def _family(order: Order, task: Task) -> Family:
    def lacks(config: ModelConfig) -> list[str]:
        free = {name: getattr(config, name) for name in ("outputs", "head_transform", "head_bias")}
        return unsupported(config, {**order.constants, **free}) + task.problem(config)

    def rules_of(config: ModelConfig) -> list[Rule]:
        heads = {task.linear: f"outputs.linear.{task_outputs(config)[0].name}"}
        if task.over == "pooled":
            heads["bert.pooler.dense"] = "outputs.pooler"
        return rules(order.norms, heads)

    def written(config: ModelConfig) -> Fields:
        (output,) = task_outputs(config)
        names = {str(number): f"LABEL_{number}" for number in range(output.size)}
        ids = {name: int(number) for number, name in names.items()}
        return {**write(config), "id2label": names, "label2id": ids, OUTPUT_NAME: output.name}

    def config_of(fields: Mapping[str, Any]) -> Fields:
        size = len(fields["id2label"]) if fields.get("id2label") else int(fields.get("num_labels", 2))
        name = fields.get(OUTPUT_NAME, task.default_name)
        output = OutputConfig(name=name, size=1 if task.ending == "ForMultipleChoice" else size, over=task.over)
        headless = {"outputs": (output,), "head_transform": False, "head_bias": False}
        return read(fields, {**order.constants, **headless})

    return Family(f"{order.prefix}{task.ending}", order.model_type, lacks, rules_of, written, config_of)


BERT_TASKS = tuple(_family(order, task) for order in ORDERS for task in TASKS)
