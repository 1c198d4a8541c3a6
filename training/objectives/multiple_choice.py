"""Multiple choice: fine-tuning on questions about a passage with a fixed number of answers, as in RACE."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gristmill.foundation.errors import InputError
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, Term
from gristmill.training.objectives.record_files import Located


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
        if not all(isinstance(each, list) and len(each) == len(lists[0]) for each in lists):
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
        if not (isinstance(answers, list) and all(isinstance(each, str) for each in answers)):
            raise InputError(f"{where}: `options` is no list of texts; correct the line")
        if len(answers) != options.choices:
            raise InputError(
                f"{where}: {len(answers)} answers, the others have {options.choices}; correct the line or set "
                "train.objective_options.choices"
            )
        number = ord(answer) - ord("A") if isinstance(answer, str) and len(answer) == 1 else answer
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(answers):
            raise InputError(f"{where}: answer {answer!r} is none of the {len(answers)}; correct the line")
        return article, [f"{question} {each}" for each in answers], number

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
