"""Classification of texts and pairs of texts: fine-tuning on one class a record, as in MNLI and QQP."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
import torch.nn.functional as F
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.model.heads import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, Objective, ObjectiveInputs, Term
from gristmill.training.objectives.objective_names import Located, label_name


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

    Options: type[LabelledFilesOptions | ClassificationOptions] = ClassificationOptions  # type: ignore[assignment]

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


# Multiple choice: fine-tuning on questions about a passage with a fixed number of answers, as in RACE.


class MultipleChoiceOptions(LabelledFilesOptions):
    """The records have the fields article, question, options (the answers) and answer: its number from 0, or A, B.
    As in RACE's own files one may hold several questions of an article: questions, options and answers, each a list."""

    choices: int = Field(4, ge=2, le=26, description="answers of every question")
    output: str = Field("choice", description="the output of size 1 in model.outputs that scores an answer")


class MultipleChoice(LabelledFiles):
    """A sample has a row for each answer: [CLS] article [SEP] question answer [SEP]."""

    Options = MultipleChoiceOptions

    @classmethod
    def expanded(cls, record: dict[str, Any], where: str) -> list[Located]:
        if "questions" not in record:
            return [(record, where)]
        lists = [record.get(name) for name in ("questions", "options", "answers")]
        if not all(isinstance(column, list) and len(column) == len(lists[0] or ()) for column in lists):
            raise InputError(
                f"{where}: questions, options and answers are not three lists of one length; correct the line"
            )
        return [
            ({"article": record.get("article"), "question": question, "options": options, "answer": answer}, where)
            for question, options, answer in zip(*lists, strict=True)
        ]

    @classmethod
    def parsed(cls, record: dict[str, Any], where: str, options: Any) -> tuple[str, list[str], int]:
        article, question = (text_of(record, field, where) for field in ("article", "question"))
        answers, answer = record.get("options"), record.get("answer")
        if not (isinstance(answers, list) and all(isinstance(choice, str) for choice in answers)):
            raise InputError(f"{where}: `options` is no list of texts; correct the line")
        if len(answers) != options.choices:
            raise InputError(
                f"{where}: {len(answers)} answers, the others have {options.choices}; correct the line or set "
                "train.objective_options.choices"
            )
        number = ord(answer) - ord("A") if isinstance(answer, str) and len(answer) == 1 else answer
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(answers):
            raise InputError(f"{where}: answer {answer!r} is none of the {len(answers)}; correct the line")
        return article, [f"{question} {choice}" for choice in answers], number

    def fields(self, record: tuple[str, list[str], int]) -> dict[str, np.ndarray]:
        article, questions, number = record
        rows = [self.packed([self.encode(article), self.encode(question)]) for question in questions]
        fields = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return fields | {"answer": np.array(number, dtype=np.int64)}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        return [Term("cross_entropy", F.cross_entropy(self._scores(model), batch["answer"], reduction="none"))]

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"answer": self._scores(model).argmax(dim=-1)}

    def _scores(self, model: ModelOutput) -> Tensor:
        """[B, choices]"""
        return model.output(self.options.output).squeeze(-1).double()


# Classification of text by the source it comes from: fine-tuning that needs no labelled file.


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
