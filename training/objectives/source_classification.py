"""Classification of text by the source it comes from: fine-tuning that needs no labelled file."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.objective import Batch, Objective, ObjectiveInputs, Term


class SourceClassificationOptions(Config):
    """sources: names of the recipe's sources, in the order of the classes."""

    sources: tuple[str, ...] = Field(min_length=2)
    output: str = Field("classes", description="the output in model.outputs that holds the classes")
    start: str = Field("[CLS]", description="piece that begins a sample")
    separator: str = Field("[SEP]", description="piece that ends it")


class SourceClassification(Objective):
    """[CLS] window [SEP], and the number of the source of the window."""

    Options = SourceClassificationOptions

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        unknown = sorted(set(inputs.samples.sources) - set(options.sources))
        if unknown:
            raise RecipeError(
                f"train.objective_options.sources lacks {unknown}; name all of {list(inputs.samples.sources)}"
            )
        self.start, self.separator = (inputs.id_of(name) for name in self.pieces(options))

    @classmethod
    def pieces(cls, options: Any) -> Sequence[str]:
        return options.start, options.separator

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        window = self.inputs.samples.sample(k)["tokens"][:-2]
        label = self.options.sources.index(self.inputs.samples.source_of(k))
        tokens = np.concatenate([[self.start], window, [self.separator]]).astype(np.int64)
        return {"tokens": tokens, "source": np.array(label, dtype=np.int64)}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        classes = model.output(self.options.output).double()
        return [Term("cross_entropy", F.cross_entropy(classes, batch["source"], reduction="none"))]

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"source": model.output(self.options.output).argmax(dim=-1)}
