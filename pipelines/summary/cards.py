"""Cards of the corpus and of the model, as the Hugging Face hub shows them: Markdown after a YAML head."""

import json

import yaml

from gristmill.pipelines.summary.answers import open_questions
from gristmill.pipelines.summary.content import Content, plain
from gristmill.pipelines.summary.public_summary import reserved, size_range

# The hub's size categories, by documents.
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
         (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"))  # fmt: skip
LISTED_LANGUAGES = 100


def dataset_card(content: Content) -> str:
    """README.md of the corpus."""
    documents = content.total("documents", "documents")
    head = {
        "pretty_name": content.recipe.name,
        "language": sorted({row["language"] for row in content.rows("languages") if row["language"]})[
            :LISTED_LANGUAGES
        ],
        "size_categories": [next((name for bound, name in SIZES if documents < bound), "n>1T")],
        "task_categories": ["text-generation"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [
                    {"split": split, "path": f"curate/documents/{split}/*.parquet"} for split in splits(content)
                ],
            }
        ],
        "tags": ["gristmill"],
    }
    if content.answers.corpus_license is not None:
        head["license"] = content.answers.corpus_license
    lines = [
        *_head(head),
        f"# {plain(content.recipe.name)}",
        "",
        f"- Intended use: {content.answer('intended_use')}",
        f"- Limitations: {content.answer('limitations')}",
        f"- Licence of the corpus: {content.answer('corpus_license')}",
        f"- Size: {size_range(content)}",
        "",
        "## Composition",
        "",
        *content.table("documents", ("source", "split", "documents", "bytes")),
        *content.table("languages", ("language", "documents", "bytes")),
        "## Licences",
        "",
        *content.table("licenses", ("source", "license", "documents", "bytes")),
        "## Collection",
        "",
        *content.table("crawl_dates", ("source", "first", "last", "dated", "documents")),
        *content.table("raw_files", ("source", "files", "bytes")),
        "## Reservations of rights",
        "",
        *content.table("reserved", ("source", "language", "rule", "removed", "documents", "share"), reserved(content)),
        "## Processing",
        "",
        *content.table("outcomes", ("source", "outcome", "step", "rule", "documents", "bytes")),
        *_end(content),
    ]
    return "\n".join(lines)


def model_card(content: Content) -> str:
    """README.md of the model. The stage `train` must be complete."""
    head = {"tags": ["gristmill"], "pipeline_tag": "text-generation"}
    if content.answers.model_license is not None:
        head["license"] = content.answers.model_license
    model = content.stages["train"].origin["recipe"].get("model")
    lines = [
        *_head(head),
        f"# {content.answer('model_name')}",
        "",
        f"- Provider: {content.answer('provider')}",
        f"- Intended use: {content.answer('intended_use')}",
        f"- Limitations: {content.answer('limitations')}",
        f"- Licence of the model: {content.answer('model_license')}",
        "",
        "## Training",
        "",
        *content.table("model", ("parameters", "tokens", "steps", "loss")),
        *content.table("tokens", ("source", "split", "documents", "tokens")),
        "## Scores",
        "",
        *(content.table("scores", ("task", "metric", "score", "error", "chance")) if "scores" in content.facts else []),
        "## Architecture",
        "",
        "```json",
        json.dumps(model, indent=1, sort_keys=True),
        "```",
        "",
        *_end(content),
    ]
    return "\n".join(lines)


def splits(content: Content) -> list[str]:
    present = {row["split"] for row in content.rows("documents")}
    return [split for split in ("train", "validation", "test") if split in present]


def _head(fields: dict) -> list[str]:
    return ["---", yaml.safe_dump(fields, sort_keys=True, allow_unicode=True).rstrip(), "---", ""]


def _end(content: Content) -> list[str]:
    questions = [f"- `{field}`: {question}" for field, question in open_questions(content.answers, content.sources)]
    return [
        "## Open questions", "", *(questions or ["None."]), "",
        *content.chain_section(), *content.queries_section(),
    ]  # fmt: skip
