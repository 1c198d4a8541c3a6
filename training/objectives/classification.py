"""Classification of texts and pairs of texts: fine-tuning on one class a record, as in MNLI and QQP."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, ObjectiveInputs, Term


class ClassificationOptions(LabelledFilesOptions):
    """The records have the fields first, second (left out for single texts) and label."""

    labels: tuple[str, ...] = Field(min_length=2, description="names of the classes, in the order of their numbers")
    first: str = "first"
    second: str = "second"
    label: str = "label"
    output: str = Field("classes", description="the output in model.outputs that holds the classes")


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

    def parsed(self, record: dict[str, Any], where: str) -> tuple[list[str], int]:
        options = self.options
        texts = [text_of(record, options.first, where)]
        if options.second in record:
            texts.append(text_of(record, options.second, where))
        label = str(record.get(options.label))
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
