"""PaperAnswers that only a person can give: a YAML file with one field for each question that the papers ask."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gristmill.foundation.config import Config, read_yaml
from gristmill.foundation.errors import InputError
from gristmill.pipelines.recipes.recipe_file import validate_config

ANSWERS_NAME = "answers.yaml"
Category = Literal["public_dataset", "licensed", "private_third_party", "crawled", "user_data", "synthetic", "other"]


OF_CATEGORY = {"crawler": "crawled", "generator": "synthetic"}  # question -> the kind of source that it is asked of


def _question(text: str) -> Any:
    return Field(default=None, description=text)


class SourceAnswers(Config):
    """PaperAnswers about one source of the recipe."""

    category: Category | None = _question("which kind of source it is in section 2 of the Commission's template")
    title: str | None = _question("name of the dataset, or of whoever it came from")
    link: str | None = _question("where it can be obtained")
    license: str | None = _question("licence of the documents whose record names none")
    description: str | None = _question("what it holds and how it was chosen")
    collected: str | None = _question("period of collection, where the documents have no date of their own")
    crawler: str | None = _question("crawled: name and operator of the crawler, its purposes and behaviour")
    generator: str | None = _question("synthetic: the model that wrote it, and from what")


class PaperAnswers(Config):
    """PaperAnswers about the provider, the model and the corpus; null is an open question."""

    provider: str | None = _question("name and contact of the provider")
    representative: str | None = _question("authorized representative in the Union, or `none`")
    small_provider: bool | None = _question("whether the provider is a small or medium-sized enterprise")
    model_name: str | None = _question("name and version of the model as it is published")
    model_dependencies: str | None = _question("the general-purpose model that this one was made from, or `none`")
    market_date: str | None = _question("date on which the model was placed on the Union market")
    types_of_content: str | None = _question("types of text: fiction, scientific, legal, press, source code ...")
    still_collecting: str | None = _question("whether data are still collected, and the model trained on them")
    code_of_practice: bool | None = _question("whether the provider signed the Code of Practice")
    opt_out_policy: str | None = _question("copyright policy and measures to respect reservations of rights")
    illegal_content: str | None = _question("measures against illegal content in the training data")
    intended_use: str | None = _question("what the corpus and the model are meant for")
    limitations: str | None = _question("known limitations and biases")
    corpus_license: str | None = _question("licence under which the corpus is published")
    model_license: str | None = _question("licence under which the model is published")
    comments: str | None = _question("anything else")
    sources: dict[str, SourceAnswers] = Field(default_factory=dict, description="answers about each source")

    def source(self, name: str) -> SourceAnswers:
        return self.sources.get(name, SourceAnswers())


def read_answers(path: Path, sources: list[str]) -> PaperAnswers:
    """Raises InputError for a file that cannot be read, an unknown field, and a source that the recipe lacks."""
    try:
        fields = read_yaml(path.read_bytes(), str(path)).value
    except OSError as error:
        raise InputError(f"{path}: {error}; name a file of answers, or leave --answers out") from error
    answers = validate_config(PaperAnswers, fields or {})
    for name in answers.sources:
        if name not in sources:
            raise InputError(f"{path}: sources.{name}: no source of the recipe; they are {', '.join(sources)}")
    return answers


def open_questions(answers: PaperAnswers, sources: list[str]) -> Iterator[tuple[str, str]]:
    """(field, question) of each answer that is missing."""
    for name, field in PaperAnswers.model_fields.items():
        if name != "sources" and getattr(answers, name) is None:
            yield name, field.description or ""
    for source in sources:
        given = answers.source(source)
        for name, field in SourceAnswers.model_fields.items():
            is_asked = name not in OF_CATEGORY or given.category == OF_CATEGORY[name]
            if is_asked and getattr(given, name) is None:
                yield f"sources.{source}.{name}", field.description or ""


def answers_form(sources: list[str]) -> str:
    """A file of answers without any, the question of each field beside it."""
    lines = ["# Answer what you can; null leaves a question open, and the papers say so."]
    lines += [
        f"{name}: null  # {field.description}" for name, field in PaperAnswers.model_fields.items() if name != "sources"
    ]
    lines.append("sources:")
    for source in sources:
        lines.append(f"  {source}:")
        lines += [f"    {name}: null  # {field.description}" for name, field in SourceAnswers.model_fields.items()]
    return "\n".join(lines) + "\n"
