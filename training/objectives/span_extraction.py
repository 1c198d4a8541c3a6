"""Span extraction: fine-tuning on questions whose answer is a part of a passage, or that have none (SQuAD 1.1, 2)."""

import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.model.heads import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, ObjectiveInputs, Term

_WORD = re.compile(r"\S+")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_ANSWER = 0  # the place of [CLS] stands for "no answer", as in BERT's fine-tuning on SQuAD 2


class SpanExtractionOptions(LabelledFilesOptions):
    """The records have the fields context, question and answers: [{"text", "answer_start"}], empty where there is none;
    files of SQuAD are read as they are. A passage that is too long is cut into windows, each a sample; in training an
    answer that does not lie in a window counts as none there."""

    output: str = Field("span", description="the output of size 2 over tokens in model.outputs: begin and end")
    unanswerable: bool = Field(True, description="questions may have no answer (SQuAD 2); false: all have one (1.1)")
    stride: int = Field(
        128, ge=1, description="tokens from the beginning of one window of a passage to that of the next"
    )
    max_question_tokens: int = Field(64, ge=1, description="what is behind them is cut off")
    max_answer_tokens: int = Field(30, ge=1)


@dataclass(frozen=True)
class SpanQuestion:
    """words: (first character, behind the last) of each word of the context. answer: (first word, last word), or
    None."""

    context: str
    question: str
    answers: tuple[str, ...]
    words: tuple[tuple[int, int], ...]
    answer: tuple[int, int] | None


@dataclass(frozen=True)
class ContextWindow:
    """first: of the context's tokens, its place. number: of the window, among the `siblings` of one question."""

    question: SpanQuestion
    first: int
    number: int
    siblings: int


class SpanExtraction(LabelledFiles):
    """[CLS] question [SEP] window of the context [SEP]; begin and end are places of the first and the last token of the
    answer."""

    Options = SpanExtractionOptions

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        self.space = _space_before_words(self.encode)
        self.words: dict[str, list[int]] = {}  # tokens of each word that was encoded
        self.records = [window for question in self.records for window in self._windows(question)]

    @classmethod
    def parsed(cls, record: dict[str, Any], where: str, options: Any) -> SpanQuestion:
        context, question = (text_of(record, field, where) for field in ("context", "question"))
        words = tuple(match.span() for match in _WORD.finditer(context))
        answers = _answers(record, where)
        if not answers:
            if not options.unanswerable:
                raise InputError(
                    f"{where}: has no answer, and train.objective_options.unanswerable is false; correct the line or "
                    "the option"
                )
            return SpanQuestion(context, question, (), words, None)
        for text, start in answers:
            if not _stands_there(context, text, start):
                raise InputError(
                    f"{where}: answer {text!r} does not stand at character {start!r} of the context; correct the line"
                )
        first, behind = answers[0][1], answers[0][1] + len(answers[0][0])
        inside = [number for number, (start, stop) in enumerate(words) if start < behind and stop > first]
        return SpanQuestion(context, question, tuple(text for text, _ in answers), words, (inside[0], inside[-1]))

    def fields(self, record: ContextWindow) -> dict[str, np.ndarray]:
        question, (tokens, word_of) = self._question_tokens(record.question), self._context_tokens(record.question)
        length = self.inputs.model.sequence_length
        offset = len(question) + 2
        visible = slice(record.first, record.first + length - offset - 1)
        begin = end = NO_ANSWER
        if record.question.answer is not None:
            first = bisect_left(word_of, record.question.answer[0]) - record.first
            last = bisect_right(word_of, record.question.answer[1]) - 1 - record.first
            if 0 <= first <= last < len(tokens[visible]):
                begin, end = offset + first, offset + last
        candidates = np.zeros(length, dtype=np.float32)
        candidates[[NO_ANSWER, *range(offset, offset + len(tokens[visible]))]] = 1.0
        places = {"begin": np.array(begin, dtype=np.int64), "end": np.array(end, dtype=np.int64)}
        return self.packed([question, tokens[visible]]) | places | {"candidates": candidates}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        begin, end = self._scores(model, batch)
        losses = [
            F.cross_entropy(scores, batch[name], reduction="none") for scores, name in ((begin, "begin"), (end, "end"))
        ]
        return [Term("cross_entropy", (losses[0] + losses[1]) / 2)]

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        """The best span of at most max_answer_tokens that begins before it ends, its score, and that of no answer."""
        begin, end = self._scores(model, batch)
        tokens = begin.shape[1]
        pairs = begin.unsqueeze(2) + end.unsqueeze(1)
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=pairs.device)
        legal = ones.triu() & ones.tril(self.options.max_answer_tokens - 1)
        legal[NO_ANSWER] = False
        score, best = pairs.masked_fill(~legal, -torch.inf).flatten(1).max(dim=1)
        none = begin[:, NO_ANSWER] + end[:, NO_ANSWER]
        return {"span": torch.stack([best // tokens, best % tokens], dim=1), "score": score, "no_answer": none}

    def scored_with(self, k: int) -> range:
        window = self.record(k)
        return range(k - window.number, k - window.number + window.siblings)

    def scores(self, k: int, predictions: Sequence[Mapping[str, Tensor]]) -> Mapping[str, float]:
        """SQuAD's exact match and F1, the best over all given answers. Of the passage's windows the best span counts,
        and no answer where it scores higher in every window than that span (arXiv 1810.04805, section 4.3)."""
        question = self.record(k).question
        spans = [float(prediction["score"]) for prediction in predictions]
        best = max(range(len(spans)), key=spans.__getitem__)
        nothing = (
            self.options.unanswerable
            and min(float(prediction["no_answer"]) for prediction in predictions) > spans[best]
        )
        predicted = "" if nothing else self._text(self.record(k + best), predictions[best]["span"])
        wanted = question.answers or ("",)
        return {
            "exact match": max(float(normalized(predicted) == normalized(prediction)) for prediction in wanted),
            "F1": max(word_f1(predicted, prediction) for prediction in wanted),
        }

    def chances(self, k: int) -> Mapping[str, float]:
        """Scores of answering nothing."""
        empty = float(not self.record(k).question.answers)
        return {"exact match": empty, "F1": empty}

    def _scores(self, model: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        spans = model.output(self.options.output).double()
        begin, end = spans.masked_fill(batch["candidates"].unsqueeze(-1) == 0, -1e9).unbind(dim=-1)
        return begin, end

    def _windows(self, question: SpanQuestion) -> list[ContextWindow]:
        free_tokens = self.inputs.model.sequence_length - len(self._question_tokens(question)) - 3
        if free_tokens < 1:
            raise RecipeError(
                f"model.sequence_length {self.inputs.model.sequence_length} leaves no room for the context behind the "
                "question; raise it or lower train.objective_options.max_question_tokens"
            )
        surplus = max(0, len(self._context_tokens(question)[0]) - free_tokens)
        firsts = range(0, surplus + min(self.options.stride, free_tokens), min(self.options.stride, free_tokens))
        return [ContextWindow(question, first, number, len(firsts)) for number, first in enumerate(firsts)]

    def _question_tokens(self, question: SpanQuestion) -> list[int]:
        return self.encode(question.question)[: self.options.max_question_tokens]

    def _context_tokens(self, question: SpanQuestion) -> tuple[list[int], list[int]]:
        """(tokens, the word that each belongs to): every word is encoded by itself, so that each token has a place."""
        tokens, word_of = [], []
        for number, (start, stop) in enumerate(question.words):
            word = self.space * (number > 0) + question.context[start:stop]
            if word not in self.words:
                self.words[word] = self.encode(word)
            tokens += self.words[word]
            word_of += [number] * len(self.words[word])
        return tokens, word_of

    def _text(self, window: ContextWindow, span: Tensor) -> str:
        question = window.question
        word_of = self._context_tokens(question)[1]
        offset = len(self._question_tokens(question)) + 2 - window.first
        first, last = (word_of[int(place) - offset] for place in span)
        return question.context[question.words[first][0] : question.words[last][1]]


def _answers(record: dict[str, Any], where: str) -> list[tuple[Any, Any]]:
    """(text, first character) of each answer, from SQuAD's list of objects, or from an object of two lists."""
    answers = record.get("answers")
    if isinstance(answers, dict):
        texts, starts = (answers.get(name) for name in ("text", "answer_start"))
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise InputError(f"{where}: `answers` has no lists text and answer_start of one length; correct the line")
        return list(zip(texts, starts, strict=True))
    if not isinstance(answers, list):
        raise InputError(f"{where}: `answers` is no list; give [] where there is no answer")
    return [
        (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (answer, None)
        for answer in answers
    ]


def _stands_there(context: str, text: Any, start: Any) -> bool:
    if not (isinstance(text, str) and text.strip() and isinstance(start, int) and not isinstance(start, bool)):
        return False
    return start >= 0 and context[start : start + len(text)] == text


def _space_before_words(encode: Callable[[str], list[int]]) -> str:
    """Prefix of a word that is encoded by itself, so that it gets the tokens it has within a text."""
    return " " if encode("one") + encode(" one") == encode("one one") else ""


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space: the rule of SQuAD's evaluate-v2.0.py."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", text).split())


def word_f1(predicted: str, wanted: str) -> float:
    """F1 of the words, as SQuAD counts them. "the red cat", "a cat" -> 2/3."""
    predicted_words, wanted_words = normalized(predicted).split(), normalized(wanted).split()
    if not predicted_words or not wanted_words:
        return float(predicted_words == wanted_words)
    both = sum((Counter(predicted_words) & Counter(wanted_words)).values())
    return 2 * both / (len(predicted_words) + len(wanted_words))
