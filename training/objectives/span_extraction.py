"""Span extraction: fine-tuning on questions whose answer is a part of a passage, or that have none (SQuAD 1.1, 2)."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gristmill.foundation.errors import InputError
from gristmill.training.model.output import ModelOutput
from gristmill.training.objectives.labelled_files import LabelledFiles, LabelledFilesOptions, text_of
from gristmill.training.objectives.objective import Batch, Term

_WORD = re.compile(r"\S+")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_ANSWER = 0  # the place of [CLS] stands for "no answer", as in BERT's fine-tuning on SQuAD 2


class SpanExtractionOptions(LabelledFilesOptions):
    """The records have the fields context, question and answers: [{"text", "answer_start"}], empty where there is none.
    A passage that is too long is cut; an answer in what is cut off counts as none in training."""

    output: str = Field("span", description="the output of size 2 over tokens in model.outputs: begin and end")
    max_answer_tokens: int = Field(30, ge=1)


@dataclass(frozen=True)
class Question:
    """words: (first character, behind the last) of each word of the context. answer: (first word, last word), or
    None."""

    context: str
    question: str
    answers: tuple[str, ...]
    words: tuple[tuple[int, int], ...]
    answer: tuple[int, int] | None


class SpanExtraction(LabelledFiles):
    """[CLS] question [SEP] context [SEP]; begin and end are places of the first and the last token of the answer."""

    Options = SpanExtractionOptions

    def parsed(self, record: dict[str, Any], where: str) -> Question:
        context, question = (text_of(record, field, where) for field in ("context", "question"))
        answers = record.get("answers")
        words = tuple(match.span() for match in _WORD.finditer(context))
        if not isinstance(answers, list):
            raise InputError(f"{where}: `answers` is no list; give [] where there is no answer")
        if not answers:
            return Question(context, question, (), words, None)
        texts = []
        for answer in answers:
            text, start = (
                (answer.get(name) for name in ("text", "answer_start")) if isinstance(answer, dict) else ("", -1)
            )
            if (
                not (isinstance(text, str) and text and isinstance(start, int))
                or context[start : start + len(text)] != text
            ):
                raise InputError(f"{where}: answer {answer!r} does not stand there in the context; correct the line")
            texts.append(text)
        first, behind = answers[0]["answer_start"], answers[0]["answer_start"] + len(texts[0])
        inside = [number for number, (start, stop) in enumerate(words) if start < behind and stop > first]
        return Question(context, question, tuple(texts), words, (inside[0], inside[-1]))

    def fields(self, record: Question) -> dict[str, np.ndarray]:
        question = self.encode(record.question)
        tokens, word_of = self._context_tokens(record)
        length = self.inputs.model.sequence_length
        question = question[: max(1, length // 2 - 3)]
        offset = len(question) + 2
        tokens, word_of = tokens[: length - offset - 1], word_of[: length - offset - 1]
        begin = end = NO_ANSWER
        if record.answer is not None and record.answer[1] in word_of:
            begin = offset + word_of.index(record.answer[0])
            end = offset + len(word_of) - 1 - word_of[::-1].index(record.answer[1])
        candidates = np.zeros(length, dtype=np.float32)
        candidates[[NO_ANSWER, *range(offset, offset + len(tokens))]] = 1.0
        places = {"begin": np.array(begin, dtype=np.int64), "end": np.array(end, dtype=np.int64)}
        return self.packed([question, tokens]) | places | {"candidates": candidates}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        begin, end = self._scores(model, batch)
        losses = [
            F.cross_entropy(scores, batch[name], reduction="none") for scores, name in ((begin, "begin"), (end, "end"))
        ]
        return [Term("cross_entropy", (losses[0] + losses[1]) / 2)]

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        """The best span of at most max_answer_tokens that begins before it ends, or no answer."""
        begin, end = self._scores(model, batch)
        tokens = begin.shape[1]
        pairs = begin.unsqueeze(2) + end.unsqueeze(1)
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=pairs.device)
        legal = ones.triu() & ones.tril(self.options.max_answer_tokens - 1)
        legal[NO_ANSWER, NO_ANSWER + 1 :] = False
        best = pairs.masked_fill(~legal, -torch.inf).flatten(1).argmax(dim=1)
        return {"begin": best // tokens, "end": best % tokens}

    def scores(self, k: int, prediction: Mapping[str, Tensor]) -> Mapping[str, float]:
        """SQuAD's exact match and F1, the best over all given answers."""
        record = self.record(k)
        found = self._text(record, int(prediction["begin"]), int(prediction["end"]))
        wanted = record.answers or ("",)
        return {
            "exact match": max(float(normalized(found) == normalized(each)) for each in wanted),
            "F1": max(word_f1(found, each) for each in wanted),
        }

    def chances(self, k: int) -> Mapping[str, float]:
        """Of answering nothing."""
        empty = float(not self.record(k).answers)
        return {"exact match": empty, "F1": empty}

    def _scores(self, model: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        spans = model.output(self.options.output).double()
        begin, end = spans.masked_fill(batch["candidates"].unsqueeze(-1) == 0, -1e9).unbind(dim=-1)
        return begin, end

    def _context_tokens(self, record: Question) -> tuple[list[int], list[int]]:
        """(tokens, the word that each belongs to): every word is encoded by itself, so that each token has a place."""
        tokens, word_of = [], []
        for number, (start, stop) in enumerate(record.words):
            found = self.encode(record.context[start:stop])
            tokens += found
            word_of += [number] * len(found)
        return tokens, word_of

    def _text(self, record: Question, begin: int, end: int) -> str:
        if begin == NO_ANSWER:
            return ""
        offset = min(len(self.encode(record.question)), max(1, self.inputs.model.sequence_length // 2 - 3)) + 2
        word_of = self._context_tokens(record)[1]
        first, last = word_of[begin - offset], word_of[end - offset]
        return record.context[record.words[first][0] : record.words[last][1]]


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space: the rule of SQuAD's evaluate-v2.0.py."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLE.sub(" ", text).split())


def word_f1(found: str, wanted: str) -> float:
    """F1 of the words, as SQuAD counts them. "the red cat", "a cat" -> 2/3."""
    ours, theirs = normalized(found).split(), normalized(wanted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    both = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * both / (len(ours) + len(theirs))
