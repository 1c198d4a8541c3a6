"""Reading of reference texts for `gristmill profiles fit`, and writing of the fitted profiles."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from gristmill.data_pipeline.filters.profiles import Profile
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import (
    LanguageConfig,
    detect_buffer,
    language_code,
    text_scripts,
)
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic

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
        pairs = [(unicodedata.normalize("NFC", text), tag) for text, tag in _records(path, text_field, language_field)]
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


def _records(path: Path, text_field: str, language_field: str) -> list[tuple[str, str]]:
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
