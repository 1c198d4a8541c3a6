"""How fair a tokenizer is to the languages of its corpus: metrics by language, vocabulary budget, requirements.

Written by the stage `tokenizer` to languages.json, where the recipe groups its text by language or has requirements."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.documents import document_ranges, read
from gristmill.data_pipeline.indexed.language_shares import language_tag
from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.scripts import text_scripts
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.tokenizers.config import TokenizerRequirements
from gristmill.tokenizers.report import GroupReport, ReportText, TokenizerReport, byte_ids, tokenizer_report
from gristmill.tokenizers.tokenizer import Tokenizer

LANGUAGES_NAME = "languages.json"
LANGUAGE_BYTES = 200_000  # measured of each language
SOURCE_BYTES = 64_000_000  # read of each source and split, to find them
BYTES, NO_LETTERS = "single bytes", "digits, punctuation, symbols"


def write_languages(folder: Path, corpus: Path, sources: Sequence[str], tokenizer: Tokenizer, reference: str) -> Any:
    """Writes languages.json; returns the report."""
    texts = language_texts(corpus, sources)
    report = tokenizer_report("trained", tokenizer, texts, reference)
    content = {
        "reference": reference,
        "languages": [group.model_dump(mode="json") for group in report.groups],
        "vocabulary": vocabulary_budget(tokenizer),
    }
    write_atomic(folder / LANGUAGES_NAME, canonical_json(content) + b"\n")
    return report


def language_texts(corpus: Path, sources: Sequence[str]) -> list[ReportText]:
    """About LANGUAGE_BYTES of each language, of all splits. Documents are taken in the order of a hash of their key
    (the last two parts of `path` in the metadata), so that translations of each other are taken together."""
    texts: list[tuple[int, ReportText]] = []
    for source in sources:
        for split in SPLITS:
            ranges, read_bytes = document_ranges(corpus, split, source), 0
            for place in Permutation(len(ranges), key_of("languages", source)).whole() if ranges else ():
                if read_bytes >= SOURCE_BYTES:
                    break
                read_bytes += ranges[place].bytes
                for row in read(ranges[place], "text", "language", "metadata").to_pylist():
                    key = translation_key(row["metadata"])
                    text = ReportText(language_tag(row["language"]), row["text"], key)
                    texts.append((key_of("languages", key or row["text"]), text))
    taken: list[ReportText] = []
    sizes: Counter[str] = Counter()
    for _, text in sorted(texts, key=lambda pair: (pair[0], pair[1].group, pair[1].text)):
        if sizes[text.group] < LANGUAGE_BYTES and text.text:
            sizes[text.group] += len(text.text.encode())
            taken.append(text)
    return taken


def translation_key(metadata: str | None) -> str:
    """The last two parts of `path` in a document's metadata: '{"path": "pages.de/linux/cat.md"}' -> "linux/cat.md"."""
    fields = json.loads(metadata) if metadata else {}
    path = fields.get("path") if isinstance(fields, dict) else None
    return "/".join(path.split("/")[-2:]) if isinstance(path, str) else ""


def vocabulary_budget(tokenizer: Tokenizer) -> dict[str, int]:
    """Number of pieces by the script of their letters, from the most."""
    of_bytes = set(byte_ids(tokenizer.pieces))
    others = [number for number in range(tokenizer.vocab_size) if number not in of_bytes]
    scripts = text_scripts(TextBuffer.of([tokenizer.decode([number]) for number in others]))
    counted = Counter(NO_LETTERS if script == "Zyyy" else script for script in scripts)
    if of_bytes:
        counted[BYTES] = len(of_bytes)
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))


def check_requirements(report: TokenizerReport, requirements: TokenizerRequirements) -> None:
    """Raises InputError naming every language that misses a required, and every language of a required without text."""
    missed = [line for group in report.groups for line in missed_requirements(group, requirements)]
    absent = sorted(requirements.languages() - {group.group for group in report.groups})
    missed += [f"{language}: no text to measure it on" for language in absent]
    if missed:
        raise InputError(
            f"the tokenizer misses {len(missed)} of tokenizer.requirements: {'; '.join(missed)}; raise "
            "tokenizer.vocab_size, tokenizer.temperature or tokenizer.character_coverage, or change the requirements"
        )


def missed_requirements(group: GroupReport, requirements: TokenizerRequirements) -> list[str]:
    """["ja: byte_fallback 0.1200, at most 0.0500"]."""
    missed = []
    for name in ("parity", "fertility", "byte_fallback"):
        required, value = requirements.limit(f"max_{name}", group.group), getattr(group, name)
        if required is not None and value is not None and value > required:
            missed.append(f"{group.group}: {name} {value:.4f}, at most {required:.4f}")
    required = requirements.limit("min_bytes_per_token", group.group)
    if required is not None and group.bytes_per_token < required:
        missed.append(f"{group.group}: bytes_per_token {group.bytes_per_token:.4f}, at least {required:.4f}")
    return missed
