"""Classification of texts and pairs of texts: fine-tuning on one class a record, as in MNLI and QQP."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
import torch.nn.functional as F
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, ObjectiveInputs, Term
from gristmill.training.objectives.record_files import label_name


class ClassificationOptions(LabelledFilesOptions):
    """first, second, label: the names of the records' fields."""

    labels: tuple[Annotated[str, BeforeValidator(label_name)], ...] = Field(
        min_length=2, description="names of the classes, in the order of their numbers"
    )
    left_out: tuple[Annotated[str, BeforeValidator(label_name)], ...] = Field(
        (), description="labels whose records are left out, such as MNLI's -"
    )
    first: str = "first"
    second: str | None = Field("second", description="null: single texts")
    label: str = "label"
    output: str = Field("classes", description="the output in model.outputs that holds the classes")

    @model_validator(mode="after")
    def labels_are_told_apart(self) -> Self:
        names = [*self.labels, *self.left_out]
        if len(set(names)) < len(names):
            raise ValueError(f"labels and left_out name {sorted(names)}; name each label once")
        return self


class Classification(LabelledFiles):
    """[CLS] first [SEP] second [SEP], and the class of the pooled first token."""

    Options = ClassificationOptions

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        sizes = {output.name: output.size for output in inputs.model.outputs}
        if sizes.get(options.output) != len(options.labels):
            raise RecipeError(
                f"train.objective: {len(options.labels)} labels need the output {options.output!r} of that size; set "
                f"model.outputs: [{{name: {options.output}, size: {len(options.labels)}}}]"
            )

    @classmethod
    def parsed(cls, record: dict[str, Any], where: str, options: Any) -> tuple[list[str], int] | None:
        if options.label not in record:
            raise InputError(
                f"{where}: no field {options.label!r}, the fields are {sorted(record)}; correct the line, or name the "
                "field in train.objective_options.label"
            )
        label = label_name(record[options.label])
        if label in options.left_out:
            return None
        texts = [text_of(record, field, where) for field in (options.first, options.second) if field is not None]
        if label not in options.labels:
            raise InputError(
                f"{where}: label {label!r} is outside the classes {list(options.labels)}; correct the line or "
                "train.objective_options.labels"
            )
        return texts, options.labels.index(label)

    def fields(self, record: tuple[list[str], int]) -> dict[str, np.ndarray]:
        texts, label = record
        return self.packed([self.encode(text) for text in texts]) | {"label": np.array(label, dtype=np.int64)}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        classes = model.output(self.options.output).double()
        return [Term("cross_entropy", F.cross_entropy(classes, batch["label"], reduction="none"))]

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"label": model.output(self.options.output).argmax(dim=-1)}
