"""Cards of the corpus and of the model, as the Hugging Face hub shows them: Markdown after a YAML head; the
corpus's Croissant metadata; and the public summary of training content (AI Act)."""

import json
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

import yaml

from gristmill.data_pipeline.readers.document import DOCUMENT_SCHEMA
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import Output
from gristmill.pipelines.provenance.summary.summary_content import Content, open_questions, plain

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


# Croissant 1.1 metadata of a corpus, by the MLCommons library: every shard with its SHA-256, and its columns.


try:  # an optional extra
    import mlcroissant
except ImportError as error:  # pragma: no cover
    raise InputError(f"gristmill summary needs the package {error.name}: pip install 'gristmill[papers]'") from None

VERSION = "http://mlcommons.org/croissant/1.1"
COLUMNS = {
    "doc_id": "128-bit hash of the source's name, the raw file's digest and the record's number",
    "text": "the text after all edits",
    "source": "the recipe's source",
    "url": "address, where the raw data have one",
    "language": "language as the raw data name it",
    "metadata": "other fields of the record, as JSON",
}
assert list(COLUMNS) == DOCUMENT_SCHEMA.names


def croissant(content: Content) -> bytes:
    """JSON-LD with addresses relative to the work folder, where it stands: the library reads the records from there."""
    context = mlcroissant.Context(conforms_to=VERSION)
    distribution: list = []
    record_sets = []
    for split in splits(content):
        files = [_file(output, context) for output in shards(content, split)]
        file_set = mlcroissant.FileSet(
            ctx=context,
            id=f"files-{split}",
            name=f"files-{split}",
            description=f"Shards of the split {split}.",
            includes=[f"curate/documents/{split}/*.parquet"],
            encoding_formats=["application/x-parquet"],
        )
        distribution += [*files, file_set]
        record_sets.append(_record_set(split, file_set.id, context))
    metadata = _quiet(mlcroissant.Metadata)(
        ctx=context,
        name=content.recipe.name,
        description=_description(content),
        license=[content.answers.corpus_license] if content.answers.corpus_license is not None else None,
        date_created=datetime.fromisoformat(content.created),
        version=f"1.0.0+{content.stages['curate'].fingerprint}",
        in_language=[row["language"] for row in content.rows("languages") if row["language"]],
        data_collection=_collection(content),
        data_limitations=[content.answers.limitations] if content.answers.limitations is not None else None,
        data_use_cases=[content.answers.intended_use] if content.answers.intended_use is not None else None,
        distribution=distribution,
        record_sets=record_sets,
    )
    return json.dumps(metadata.to_json(), indent=1, sort_keys=True, ensure_ascii=False, default=str).encode() + b"\n"


def check_croissant(document: bytes) -> list[str]:
    """The errors that the MLCommons library finds."""
    try:
        metadata = _quiet(mlcroissant.Dataset)(json.loads(document)).metadata
    except mlcroissant.ValidationError as error:
        return str(error).splitlines()
    return sorted(metadata.ctx.issues.errors)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the library's warnings about properties that are recommended: they are open questions."""

    def called(*positional: Any, **named: Any) -> Any:
        logger = logging.getLogger("absl")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            return function(*positional, **named)
        finally:
            logger.setLevel(level)

    return called


def shards(content: Content, split: str) -> list[Output]:
    return [
        output for output in content.stages["curate"].outputs if output.path.startswith(f"documents/{split}/")
    ]  # sorted by path


def _file(output: Output, context: "mlcroissant.Context") -> "mlcroissant.FileObject":
    return mlcroissant.FileObject(
        ctx=context,
        id=output.path,
        name=output.path,
        content_url=f"curate/{output.path}",
        content_size=f"{output.bytes} B",
        encoding_formats=["application/x-parquet"],
        sha256=output.sha256,
    )


def _record_set(split: str, file_set: str, context: "mlcroissant.Context") -> "mlcroissant.RecordSet":
    fields = [
        mlcroissant.Field(
            ctx=context,
            id=f"{split}/{name}",
            name=name,
            description=description,
            data_types=[mlcroissant.DataType.TEXT],
            source=mlcroissant.Source(
                ctx=context, file_set=file_set, extract=mlcroissant.Extract(ctx=context, column=name)
            ),
        )
        for name, description in COLUMNS.items()
    ]
    return mlcroissant.RecordSet(
        ctx=context, id=split, name=split, description=f"Documents of the split {split}.", fields=fields
    )


def _description(content: Content) -> str:
    documents, size = (content.total("documents", column) for column in ("documents", "bytes"))
    return (
        f"{documents} documents, {size} bytes of text (query documents, digest {content.facts['documents'].digest}, in "
        f"summary.json). Built by gristmill: stage curate {content.stages['curate'].fingerprint}, from the raw files "
        f"that lock.json pins."
    )


def _collection(content: Content) -> str | None:
    dated = [row for row in content.rows("crawl_dates") if row["last"]]
    if not dated:
        return None
    periods = "; ".join(f"{row['source']}: {row['first']} to {row['last']}" for row in dated)
    return f"{periods} (query crawl_dates, digest {content.facts['crawl_dates'].digest})"


# Public summary of training content, by the sections of the European Commission's template of July 2025 (AI Act,
# Article 53(1)(d)). The headings are the template's subjects in our words: copy the text into the Commission's form.

# Subsections of section 2, by the category of a source.
CATEGORIES = {
    "public_dataset": "2.1 Publicly available datasets",
    "licensed": "2.2.1 Datasets licensed by rightsholders",
    "private_third_party": "2.2.2 Private datasets of other third parties",
    "crawled": "2.3 Data crawled and scraped from online sources",
    "user_data": "2.4 User data",
    "synthetic": "2.5 Synthetic data",
    "other": "2.6 Other sources",
}
BILLION = 10**9


def public_summary(content: Content) -> str:
    """The summary as Markdown."""
    lines = [
        f"# Public summary of training content: {plain(content.recipe.name)}",
        "",
        f"Written {content.created} by gristmill; papers {content.fingerprint}. Not legal advice. What is marked "
        "open only a person can know; nothing here was guessed.",
        "",
        *_general(content),
        *_sources(content),
        *_processing(content),
        *_open(content),
        *content.chain_section(),
        *content.queries_section(),
    ]
    return "\n".join(lines)


def _general(content: Content) -> list[str]:
    dates = [row["last"] for row in content.rows("crawl_dates") if row["last"]]
    latest = f"{max(dates)} (query {content.origin_of('crawl_dates')})" if dates else "the documents have no date"
    undated = sorted({row["source"] for row in content.rows("crawl_dates") if row["dated"] < row["documents"]})
    if dates and undated:
        latest += f"; not all documents of {', '.join(map(plain, undated))} have one"
    return [
        "## 1 General information",
        "",
        "### 1.1 Provider",
        "",
        f"- Name and contact: {content.answer('provider')}",
        f"- Authorized representative: {content.answer('representative')}",
        "",
        "### 1.2 Model",
        "",
        f"- Name and version: {content.answer('model_name')}",
        f"- Made from another general-purpose model: {content.answer('model_dependencies')}",
        f"- Placed on the Union market: {content.answer('market_date')}",
        "",
        "### 1.3 Modalities, size and other characteristics",
        "",
        "- Modality: text",
        f"- Size of the training data: {size_range(content)}",
        f"- Types of content: {content.answer('types_of_content')}",
        f"- Latest date of acquisition: {latest}",
        f"- Collection goes on: {content.answer('still_collecting')}",
        "- Languages of the training split, as detected:",
        "",
        *content.table("languages", ("language", "documents", "bytes")),
        f"- Comments: {content.answer('comments')}",
        "",
    ]


def size_range(content: Content) -> str:
    """The template's range of the training split's tokens; bytes of text before the corpus is indexed."""
    if "tokens" not in content.facts:
        size = content.total("documents", "bytes", split="train")
        return f"{size:,} bytes of text (query {content.origin_of('documents')}); tokens once it is indexed"
    tokens = content.total("tokens", "tokens", split="train")
    bounds = ((BILLION, "less than 1 billion tokens"), (10_000 * BILLION, "1 billion to 10 trillion tokens"))
    text = next((text for bound, text in bounds if tokens < bound), "more than 10 trillion tokens")
    return f"{text}: {tokens:,} (query {content.origin_of('tokens')})"


def _sources(content: Content) -> list[str]:
    lines = ["## 2 Data sources", ""]
    for category, heading in CATEGORIES.items():
        of_category = [name for name in content.sources if content.answers.source(name).category == category]
        lines += [f"### {heading}", ""]
        lines += [line for name in of_category for line in _source(content, name)] or ["None of the sources.", ""]
    unsorted = [name for name in content.sources if content.answers.source(name).category is None]
    if unsorted:
        lines += ["### Sources whose kind is open", ""]
        lines += [line for name in unsorted for line in _source(content, name)]
    return lines


def _source(content: Content, name: str) -> list[str]:
    given = content.answers.source(name)
    config = next(source for source in content.recipe.sources if source.name == name)
    lines = [f"#### {plain(name)}", "", f"- Format read: {config.format}"]
    asked = ["category", "title", "link", "description", "collected"]
    asked += ["crawler"] * (given.category == "crawled") + ["generator"] * (given.category == "synthetic")
    lines += [f"- {field.capitalize()}: {content.answer(field, name)}" for field in asked]
    lines += [""]
    for fact, columns in (
        ("raw_files", ("files", "bytes")),
        ("documents", ("split", "documents", "bytes")),
        ("tokens", ("split", "documents", "tokens")),
        ("licenses", ("license", "documents", "bytes")),
        ("crawl_dates", ("first", "last", "dated", "documents")),
        ("robots", ("robots_disallowed", "documents", "bytes")),
        ("num_domains", ("domains", "documents")),
        ("domains", ("domain", "documents", "bytes")),
    ):
        rows = content.rows(fact, source=name)
        if rows:
            about = content.facts[fact].about
            lines += [f"{about[0].upper()}{about[1:]}:", "", *content.table(fact, columns, rows)]
    if not any(row["license"] for row in content.rows("licenses", source=name)):
        lines += [f"Licence: {content.answer('license', name)}", ""]
    return lines


def _processing(content: Content) -> list[str]:
    lines = [
        "## 3 Data processing",
        "",
        "### 3.1 Reservations of rights (text and data mining)",
        "",
        f"- Signed the Code of Practice: {content.answer('code_of_practice')}",
        f"- Policy and measures: {content.answer('opt_out_policy')}",
        "",
        *_inputs_of_reservations(content),
        "Documents removed by them, by source and detected language:",
        "",
        *content.table("reserved", ("source", "language", "rule", "removed", "documents", "share"), reserved(content)),
        "### 3.2 Illegal content",
        "",
        f"- Measures: {content.answer('illegal_content')}",
        "",
        "### 3.3 Other processing",
        "",
        "Documents read, by what became of them:",
        "",
        *content.table("outcomes", ("source", "outcome", "step", "rule", "documents", "bytes")),
    ]
    return lines


def _inputs_of_reservations(content: Content) -> list[str]:
    """robots.txt files and lists that the recipe applies, with their days and digests."""
    agents = ", ".join(map(plain, content.recipe.curate.lists.robots_agents))
    lines = [
        f"- {item.list}{f', for the crawlers {agents}' if item.list == 'robots' else ''}: {item.first} to {item.last}, "
        f"`{item.sha256}`"
        for item in content.reservations
    ]
    return [*(lines or ["- The recipe applies no robots.txt files and no opt-out lists."]), ""]


def reserved(content: Content) -> list[dict]:
    """Rows of the fact with the share of the language's documents that were removed."""
    return [
        row | {"share": f"{row['removed'] / row['documents']:.1%}" if row["documents"] else "0%"}
        for row in content.rows("reserved")
    ]


def _open(content: Content) -> list[str]:
    questions = list(open_questions(content.answers, content.sources))
    lines = [f"- `{field}`: {question}" for field, question in questions]
    return ["## Open questions", "", *(lines or ["None."]), ""]
