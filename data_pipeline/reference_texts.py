"""Reading of reference texts for `gristmill profiles fit`, and writing of the fitted profiles."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import orjson

from gristmill.data_pipeline.filters.profiles import Profile
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.scripts import language_code, text_scripts
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic

UNDETERMINED = ("", "und", "mul", "zxx")


def read_reference(
    paths: Sequence[Path], text_field: str, language_field: str, languages: Collection[str] = ()
) -> dict[tuple[str, str], list[str]]:
    """Read JSONL files, compressed or not, as (language, script) -> texts. languages: only these; empty for all.

    Raises InputError for a file that cannot be read or lacks a field, RecipeError if no English text is left."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    wanted = {language_code(name) for name in languages} | ({"en"} if languages else set())
    for path in paths:
        pairs = _records(path, text_field, language_field)
        scripts = text_scripts(TextBuffer.of([text for text, _ in pairs]))
        for (text, tag), script in zip(pairs, scripts, strict=True):
            language = language_code(tag.replace("_", "-").partition("-")[0])
            if language not in UNDETERMINED and (not wanted or language in wanted):
                found[language, script].append(text)
    if ("en", "Latn") not in found:
        raise RecipeError(
            f"no English text among {sum(map(len, found.values()))} records; thresholds are matched to English ones: "
            f"give a corpus with English texts, or set the field of the language with --language-field"
        )
    return dict(found)


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
                held = ", ".join(record) if isinstance(record, dict) else "none"
                raise InputError(
                    f"{path}: line {number}: no text in field {field!r}; fields are {held}; set --text-field or "
                    f"--language-field"
                )
        pairs.append((record[text_field], record[language_field]))
    return pairs
