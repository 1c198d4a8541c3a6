"""The commands that fit models of the curation: `gristmill extractor fit`, `profiles fit` and `quality fit`."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import typer
from rich.table import Table

from gristmill.data_pipeline.filters.fit_profiles import fit_profiles
from gristmill.data_pipeline.filters.profiles import Profile
from gristmill.data_pipeline.quality.config import MIN_DOCUMENTS
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.read import locate, records_of
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import (
    BUNDLED,
    LanguageConfig,
    detect_buffer,
    language_code,
    model_languages,
    text_scripts,
)
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter, print_block
from gristmill.pipelines.cli.options import output_file, with_option_groups
from gristmill.pipelines.init.survey import file_kind

extractor_app = typer.Typer(no_args_is_help=True, help="Weights of the HTML extractor `blocks`.")


@extractor_app.callback()
def extractor() -> None:
    """Keeps `fit` a subcommand: typer would drop the name of an only command."""


@extractor_app.command("fit")
def fit_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of labelled pages.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE", callback=output_file, help="The weights file to write (.npz).")
    ],
) -> None:
    """Fit the weights of the extractor blocks on folders of labelled pages (docs/extraction.md)."""
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"{folder}: no such folder; give folders of labelled pages")
    try:
        from gristmill.data_pipeline.extraction.fit import fit_weights  # LightGBM, in the extra `extractor`
    except ModuleNotFoundError as error:
        if error.name != "lightgbm":
            raise
        raise RecipeError("fitting needs LightGBM: pip install 'gristmill[extractor]'") from None
    from gristmill.pipelines.cli.train_extractor import TRAINER  # torch

    weights = fit_weights(folders, output, TRAINER, Reporter.to_terminal())
    described = weights.provenance
    print(f"{output}: {described['pages']} pages of {described['sites']} sites, {described['blocks']} blocks")


# The command for language-specific filter profiles: `gristmill profiles fit`.

profiles_app = typer.Typer(no_args_is_help=True, help="Filter thresholds and stop words per language.")


@profiles_app.callback()
def profiles() -> None:
    """Keeps `fit` a subcommand: typer would drop the name of an only command."""


@dataclass(frozen=True)
class ReferenceFields:
    """Fields of the reference text's records."""

    text_field: Annotated[str, typer.Option(help="The text field.")] = "text"
    language_field: Annotated[str, typer.Option(help="The language field (ISO 639 or BCP 47).")] = "language"


@profiles_app.command("fit")
@with_option_groups
def fit_profiles_command(
    corpus: Annotated[
        list[Path], typer.Option(metavar="FILE", help="JSONL of clean text with language codes; must include English.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Output folder, one YAML file per language.")],
    fields: ReferenceFields,
    languages: Annotated[str, typer.Option(help="Only these languages, comma-separated; empty: all.")] = "",
    detectable: Annotated[
        bool, typer.Option("--detectable", help="Only languages that the bundled language model detects.")
    ] = False,
    source: Annotated[str, typer.Option(help="Description of the reference text.")] = "",
) -> None:
    """Derive profiles from reference text: stop words by frequency, thresholds at English's quantiles."""
    selected = [name for name in languages.split(",") if name]
    if detectable:
        selected = [name for name in model_languages(BUNDLED) if not selected or name in selected]
    texts, mislabelled = read_reference(corpus, fields.text_field, fields.language_field, selected)
    origin = source or ", ".join(path.name for path in corpus)
    profiles = fit_profiles(texts, origin)
    write_profiles(
        profiles, output, "Written by `gristmill profiles fit`; numbers and words are derived from `source`."
    )
    print(
        f"{output}: {len(profiles)} profiles from {sum(map(len, texts.values()))} documents in {len(texts)} languages"
    )
    for language, documents in sorted(mislabelled.items()):
        print(
            f"left out: {documents} labelled {language}, which another text of that label shows to be another language"
        )


# The commands for models of text quality: `gristmill quality fit` and `gristmill quality language-model`.

quality_app = typer.Typer(no_args_is_help=True, help="Models of text quality.")


@dataclass(frozen=True)
class LabelledDocuments:
    """Where the labels and the texts are."""

    label_field: Annotated[str | None, typer.Option(help="Field of the label, for one path with both classes.")] = None
    good: Annotated[str, typer.Option(metavar="LABEL,...", help="Labels of the positive class.")] = "good"
    bad: Annotated[str, typer.Option(metavar="LABEL,...", help="Labels of the negative class.")] = "bad"
    text_field: Annotated[str, typer.Option(help="Field of the text.")] = "text"
    max_documents: Annotated[int, typer.Option(min=MIN_DOCUMENTS, help="Of each class; the first are read.")] = 50_000


@quality_app.command("fit")
@with_option_groups
def fit_quality_command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="GOOD BAD", help="Two files or folders; or one file with --label-field."),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", callback=output_file, help="The model to write (.safetensors).")
    ],
    documents: LabelledDocuments,
    ngram: Annotated[int, typer.Option(min=1, max=3, help="Tokens of the longest n-gram.")] = 2,
    bits: Annotated[int, typer.Option(min=10, max=24, help="The model has 2**BITS weights of 4 bytes.")] = 18,
) -> None:
    """Fit a linear model of text quality on good and bad documents; a recipe names it in curate.quality_scores."""
    labels = (documents.good, documents.bad)
    positive, negative = labelled_texts(paths, documents)
    from gristmill.data_pipeline.quality.linear_model import (  # scikit-learn takes a second
        FitSettings,
        fit_linear_model,
    )

    model = fit_linear_model(positive, negative, FitSettings(ngram, 2**bits, labels=labels))
    model.save(output)
    print_report(model.report, labels)
    print(f"{output}: write in a recipe: curate: {{quality_scores: {{NAME: {{model: {output}}}}}}}")


@quality_app.command("language-model")
def language_model_command(
    paths: Annotated[list[Path], typer.Argument(metavar="TEXTS...", help="Files or folders of good text.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE", callback=output_file, help="The model to write (.safetensors).")
    ],
    order: Annotated[int, typer.Option(min=1, max=3, help="Tokens of the longest n-gram.")] = 3,
    text_field: Annotated[str, typer.Option(help="Field of the text.")] = "text",
    max_documents: Annotated[int, typer.Option(min=1, help="Of each path; the first are read.")] = 50_000,
) -> None:
    """Fit an n-gram language model; a recipe names it in curate.quality_scores to score documents by perplexity."""
    documents = LabelledDocuments(text_field=text_field, max_documents=max_documents)
    texts = [text for path in paths for text in _texts_of(path, documents)]
    from gristmill.data_pipeline.quality.ngram_lm import fit_ngram_model  # numba, which help does without

    model = fit_ngram_model(texts, order)
    model.save(output)
    report = model.report
    counts = ", ".join(f"{count:,} of {size}" for size, count in enumerate(report["ngrams"], start=1))
    print(f"{report['documents']:,} documents, {report['tokens']:,} tokens; n-grams: {counts}")
    print(f"{output}: write in a recipe: curate: {{quality_scores: {{NAME: {{model: {output}}}}}}}")


def print_report(report: dict[str, Any], labels: tuple[str, str]) -> None:
    table = Table("mean score", f"share that is {labels[0]}", "documents", title="on held-out documents")
    for row in report["reliability"]:
        table.add_row(f"{row['score']:.3f}", f"{row['positive']:.3f}", f"{row['documents']:,}")
    print_block(table)
    counts = ", ".join(f"{count:,} {label}" for label, count in report["documents"].items())
    shared = report["in_both_classes"]
    print(
        f"{counts}{f', {shared:,} left out that are in both' if shared else ''}; AUC {report['auc']:.4f}, calibration "
        f"error {report['calibration_error']:.4f} on {report['measured_documents']:,} held-out documents"
    )


def labelled_texts(paths: Sequence[Path], documents: LabelledDocuments) -> tuple[list[str], list[str]]:
    """(texts of the positive class, of the negative one).

    Raises RecipeError for a call that does not say which is which, InputError for files without such documents."""
    if documents.label_field is None:
        if len(paths) != 2:
            raise RecipeError(
                f"{len(paths)} paths; name good and bad documents, GOOD BAD, or one path with --label-field"
            )
        return tuple(_texts_of(path, documents) for path in paths)  # type: ignore[return-value]
    if len(paths) != 1:
        raise RecipeError(f"{len(paths)} paths and --label-field; name one path, whose records have the label")
    good, bad = (set(value.split(",")) for value in (documents.good, documents.bad))
    if good & bad:
        raise RecipeError(f"--good and --bad both name {min(good & bad)!r}")
    by_label: dict[str, list[str]] = {label: [] for label in (*good, *bad)}
    others: dict[str, int] = {}
    for record in _records(paths[0], documents, documents.label_field):
        label = _label_of(record, documents.label_field, paths[0])
        if label not in by_label:
            others[label] = others.get(label, 0) + 1
        else:
            by_label[label].append(record.text)
    for option, names in (("--good", good), ("--bad", bad)):
        if missing := sorted(name for name in names if not by_label[name]):
            present = sorted(others | {label: 1 for label, texts in by_label.items() if texts})
            raise InputError(
                f"{paths[0]}: no record has {documents.label_field}={missing[0]!r}, which {option} names; its labels "
                f"are {', '.join(present[:20]) or 'none'}"
            )
    return tuple(
        [text for name in sorted(names) for text in by_label[name]][: documents.max_documents] for names in (good, bad)
    )  # type: ignore[return-value]


def _label_of(record: Record, field: str, path: Path) -> str:
    label = record.metadata.get(field)
    if label is None:
        raise InputError(f"{path}: record {record.number} has no field {field!r}; name the label's with --label-field")
    return str(label)


def _texts_of(path: Path, documents: LabelledDocuments) -> list[str]:
    texts: list[str] = []
    for record in _records(path, documents, None):
        texts.append(record.text)
        if len(texts) == documents.max_documents:
            break
    return texts


def _records(path: Path, documents: LabelledDocuments, label_field: str | None) -> Iterator[Record]:
    """The records of a file, or of all files of a folder in the order of their names.

    Raises InputError for a path without a file that can be read, and for an unreadable record."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    kinds = {file: file_kind(file) for file in files}
    if all(kind is None for kind, _ in kinds.values()):
        reasons = ", ".join(sorted({reason for _, reason in kinds.values()}))
        raise InputError(f"{path}: no file that is read as documents ({reasons or 'no files'})")
    for file, (kind, _) in kinds.items():
        if kind is None:
            continue
        source = SourceConfig(
            name="labelled",
            format="text" if kind == "code" else kind,  # type: ignore[arg-type]
            paths=(str(file),),
            text_field=documents.text_field,
            metadata_fields="none" if label_field is None else (label_field,),
        )
        for _, location in locate(source):
            for record in records_of(location, source):
                if isinstance(record, Unreadable):
                    raise InputError(f"{file}: record {record.number}: {record.reason}")
                yield record


# Reading of reference texts for `gristmill profiles fit`, and writing of the fitted profiles.


UNDETERMINED = ("", "und", "mul", "zxx")
SURE = 0.5  # score of the language model from which a document is one of its label


class ReferenceTexts(NamedTuple):
    """texts: by (language, script), composed (NFC) as curation does. mislabelled: documents that were left out, by
    label: the language model gives them less than half the score of their label that another document of it has. The
    Universal Declaration has Welche beside French under `fr`, and Chimwiini beside Swahili under `sw`."""

    texts: dict[tuple[str, str], list[str]]
    mislabelled: Counter[str]


def read_reference(
    paths: Sequence[Path], text_field: str, language_field: str, languages: Collection[str] = ()
) -> ReferenceTexts:
    """Reads JSONL files, compressed or not. languages: only these; empty for all.

    Raises InputError for a file that cannot be read or lacks a field, RecipeError if no English text is left."""
    texts_by_label: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    mislabelled: Counter[str] = Counter()
    wanted = {language_code(name) for name in languages} | ({"en"} if languages else set())
    for path in paths:
        pairs = [
            (unicodedata.normalize("NFC", text), tag)
            for text, tag in _labelled_records(path, text_field, language_field)
        ]
        texts = TextBuffer.of([text for text, _ in pairs])
        scripts, detected = text_scripts(texts), detect_buffer(texts, LanguageConfig()).to_pylist()
        for (text, tag), script, row in zip(pairs, scripts, detected, strict=True):
            language = language_code(tag.replace("_", "-").partition("-")[0])
            if language not in UNDETERMINED and (not wanted or language in wanted):
                texts_by_label[language, script].append(
                    (row["language_score"] * (row["detected_language"] == language), text)
                )
    texts_of: dict[tuple[str, str], list[str]] = {}
    for (language, script), scored in texts_by_label.items():
        best = max(score for score, _ in scored)
        kept = [text for score, text in scored if best < SURE or score >= best / 2]
        texts_of[language, script] = kept
        mislabelled[language] += len(scored) - len(kept)
    if ("en", "Latn") not in texts_by_label:
        raise RecipeError(
            f"no English text among {sum(map(len, texts_by_label.values()))} records; thresholds are matched to "
            f"English ones: give a corpus with English texts, or set the field of the language with --language-field"
        )
    return ReferenceTexts(texts_of, +mislabelled)


def write_profiles(profiles: Sequence[Profile], folder: Path, header: str) -> None:
    """Write one YAML file per profile, named by its key. header: comment lines without their `# `."""
    import yaml  # loaded here: the command line would wait for it

    comment = "".join(f"# {line}\n" for line in header.splitlines())
    for profile in profiles:
        fields = {name: value for name, value in profile.model_dump(mode="json").items() if value not in ([], {})}
        text = yaml.safe_dump(fields, allow_unicode=True, sort_keys=False, width=118, default_flow_style=None)
        write_atomic(folder / f"{profile.key}.yaml", (comment + text).encode())


def _labelled_records(path: Path, text_field: str, language_field: str) -> list[tuple[str, str]]:
    pairs = []
    try:
        with path.open("rb") as file:
            lines = b"".join(blocks(file, str(path))).splitlines()
    except (OSError, Damaged) as error:
        raise InputError(f"{path}: cannot be read ({error}); name a JSONL file, plain or compressed") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InputError(f"{path}: line {number} is not JSON ({error}); name a JSONL file") from error
        for field in (text_field, language_field):
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                fields = ", ".join(record) if isinstance(record, dict) else "none"
                raise InputError(
                    f"{path}: line {number}: no text in field {field!r}; fields are {fields}; set --text-field or "
                    f"--language-field"
                )
        pairs.append((record[text_field], record[language_field]))
    return pairs
