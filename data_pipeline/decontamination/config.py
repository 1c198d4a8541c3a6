"""What the recipe says about decontamination."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config

Policy = Literal["split", "drop", "annotate"]


class BenchmarkConfig(Config):
    """A benchmark in local files: JSON lines, or plain text with one example a line; .gz, .bz2, .zst are unpacked.

    fields: those whose texts are indexed, each by itself; a list (choices) gives one text an entry, `a.b` goes into
    an object. Files of plain text take no fields, unless `lines` names the lines of a record that has several:
    HellaSwag's are [context, gold, ending, ending, ending, ending], of which fields [context, ending] are wanted.
    answers: those of the fields that hold answers, which are not searched for in other wordings; if none are named,
    all but the first whose value is a list. A field may be missing in some records, not in all.
    id_field: the record's id (`#` and its number for a record without one); the record's number from 0 if not given
    (across the files, in the order they are named). Where the files lie decides nothing; what is in them does."""

    name: str = Field(min_length=1)
    paths: tuple[Path, ...] = Field(min_length=1, json_schema_extra={"execution": True})
    fields: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    id_field: str | None = None

    @model_validator(mode="after")
    def lines_hold_the_fields(self) -> Self:
        strange = [field for field in self.fields if self.lines and field not in self.lines]
        if self.lines and not self.fields:
            raise ValueError(f"benchmark {self.name}: lines are named and fields are not; choose among {self.lines}")
        if strange:
            raise ValueError(f"benchmark {self.name}: no line is called {strange[0]!r}; lines are {self.lines}")
        return self

    @model_validator(mode="after")
    def answers_are_fields(self) -> Self:
        strange = [field for field in self.answers if field not in self.fields]
        if strange:
            raise ValueError(f"benchmark {self.name}: the answer {strange[0]!r} is none of its fields {self.fields}")
        return self


class TaskChoice(Config):
    """A task (or suite) of the evaluation by name. fields: the fields of a record that are indexed, each by itself;
    none: all that hold text."""

    name: str = Field(min_length=1)
    fields: tuple[str, ...] = ()


class DecontaminateConfig(Config):
    """Defaults are MT-NLG 530B's (Megatron-LM tools/openwebtext/filter_ngrams.py) unless said otherwise.

    benchmarks: in local files. tasks: of the evaluation, a name or {name, fields}, whose texts the caller hands over;
    task_data: the folder their files lie in, if it is not evaluate.data; download: lm-eval's own tasks may be named
    too, whose texts are read from the data hub. ngram: words of a match. min_ngram: a text of fewer words than ngram
    is searched as one n-gram if it has at least so many; shorter texts are counted and not searched.
    common: an n-gram that stands so often in the corpus is a common phrase and does not count. common_in: so many
    documents (GPT-3: "13-grams that matched more than 10 training documents", appendix C), or so many `places`
    (Megatron: key_threshold 10). Documents, so that a text that repeats a question ten times does not hide itself.
    max_edits: texts of at most max_edited_words words are also found with that many words substituted, inserted or
    deleted: where words in their order have at least min_share of the text's information and at least
    min_information nats (edits.py); 0: not searched so. answer_window: a question of fewer than min_ngram words
    is found word for word with an answer that begins in so many words behind it; 0: not searched.
    policy: `split` removes the match, `margin` characters on each side and the rest of the sentence, and keeps pieces
    of at least min_piece_characters; a document of more than max_pieces is dropped. `drop` removes the document;
    `annotate` only reports."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()
    tasks: tuple[TaskChoice, ...] = ()
    task_data: Path | None = Field(default=None, json_schema_extra={"execution": True})
    download: bool = Field(default=False, json_schema_extra={"execution": True})
    ngram: int = Field(default=13, ge=2)
    min_ngram: int = Field(default=8, ge=2)
    common: int = Field(default=10, ge=2)
    common_in: Literal["documents", "places"] = "documents"
    max_edits: int = Field(default=3, ge=0)
    min_share: float = Field(default=0.55, gt=0, le=1)
    min_information: float = Field(default=34.0, gt=0)
    answer_window: int = Field(default=50, ge=0)
    policy: Policy = "split"
    margin: int = Field(default=200, ge=0)
    min_piece_characters: int = Field(default=200, ge=1)
    max_pieces: int = Field(default=10, ge=1)

    @field_validator("tasks", mode="before")
    @classmethod
    def short_forms(cls, value: object) -> object:
        entries = value if isinstance(value, list | tuple) else [value]
        return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]

    @model_validator(mode="after")
    def n_grams_in_order(self) -> Self:
        if self.min_ngram > self.ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is over ngram={self.ngram}; try {self.ngram}")
        return self

    @model_validator(mode="after")
    def something_is_named_once(self) -> Self:
        names = [*(benchmark.name for benchmark in self.benchmarks), *(task.name for task in self.tasks)]
        if not names:
            raise ValueError("no benchmarks and no tasks are named, so nothing would be searched; name some, or null")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the benchmark {twice[0]!r} is named twice; give each its own name")
        return self

    @property
    def max_edited_words(self) -> int:
        """A longer text keeps an n-gram whole through max_edits edits, each of up to two folded words (`it's`): what is
        left of ngram 13 and 3 edits in 59 words is 53 in four runs, one of which has 14."""
        return (self.max_edits + 1) * self.ngram + 2 * self.max_edits if self.max_edits else 0
