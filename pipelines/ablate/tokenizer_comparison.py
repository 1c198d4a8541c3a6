"""Compares trained and pretrained tokenizers on one set of texts (`gristmill tokenizer compare`)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.corpus.splits import document_ranges, read
from gristmill.data_pipeline.indexed.draws import key_of
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.foundation.lock import RawFile
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.config import PRESETS, ProxyConfig, TokenizerConfig
from gristmill.tokenizers.pretrained import write_json
from gristmill.tokenizers.tokenizer import MODEL_NAME, Tokenizer, load_tokenizer
from gristmill.tokenizers.tokenizer_report import ModelBitsPerByte, ReportText, TokenizerReport, tokenizer_report
from gristmill.tokenizers.train_tokenizer import END_OF_DOCUMENT, train, train_byte_level
from gristmill.tokenizers.word_counts import count_texts

# One text in 10 is held out, by a hash of its key: translations of one text stay in the same split.
HELD_OUT_MODULUS = 10
# Tokenizers that can be trained: the presets of a recipe, and byte-level BPE without and with merges across spaces.
STRATEGIES: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS} | {
    "byte_bpe": {"algorithm": "byte_bpe"},
    "superwords": {"algorithm": "byte_bpe", "superwords": 0.2},
}
MODELS_NAME = "models"  # folder of the scores of small models


@dataclass(frozen=True)
class TokenizerComparison:
    """folder: for trained tokenizers and scores of small models. pretrained: folders of further tokenizers. reference:
    the group that parity is relative to, such as "en". proxy: None trains no small models."""

    folder: Path
    presets: Sequence[str]
    pretrained: Sequence[Path]
    vocab_size: int
    reference: str
    proxy: ProxyConfig | None


def compare_tokenizers(
    texts: Sequence[ReportText], comparison: TokenizerComparison, reporter: Reporter
) -> list[TokenizerReport]:
    """One report per tokenizer on the held-out texts: presets are trained into FOLDER/NAME, pretrained ones loaded.

    Raises RecipeError for an unknown preset, InputError if there is too little text for the vocabulary."""
    if unknown := sorted(set(comparison.presets) - STRATEGIES.keys()):
        raise RecipeError(f"no preset {unknown[0]!r}; choose from {', '.join(STRATEGIES)}")
    training, held_out = _split(texts)
    reports = []
    for name in [*comparison.presets, *map(str, comparison.pretrained)]:
        if name in STRATEGIES:
            tokenizer = _train(name, training, comparison.folder, comparison.vocab_size)
        else:
            tokenizer = load_tokenizer(Path(name))
        bits = None
        if comparison.proxy is not None:
            from gristmill.pipelines.ablate.proxy_model import (
                bits_per_byte,  # imported here: torch takes seconds to load
            )

            bits = bits_per_byte(
                tokenizer, training, held_out, comparison.proxy, reporter, comparison.folder / MODELS_NAME
            )
        reports.append(tokenizer_report(name, tokenizer, held_out, comparison.reference, bits))
        reporter.info(f"{name}: {reports[-1].total.bytes_per_token:.3f} bytes per token")
    return reports


def read_texts(path: Path) -> list[ReportText]:
    """Texts of a `curate` folder (all documents of its train split; group: the language, else the source) or of a
    .jsonl, .jsonl.gz or .jsonl.zst file with fields `text`, `language` and optionally `path`: texts whose paths end
    with the same two parts are translations of each other.

    Raises InputError if there are none."""
    texts = _corpus_texts(path) if path.is_dir() else _file_texts(path)
    if not texts:
        raise InputError(f"{path}: no texts; name a curate folder, or a .jsonl file with the fields text and language")
    return texts


def rows(reports: Sequence[TokenizerReport]) -> list[list[str]]:
    """A table with one row per tokenizer, after a header."""
    table = [["tokenizer", "pieces", "encoder", "bytes/token", "tokens/word", "byte tokens", "unused", "failures"]]
    for report in reports:
        rates = [
            f"{report.total.bytes_per_token:.3f}",
            f"{report.total.fertility:.3f}",
            f"{report.total.byte_fallback:.2%}",
        ]
        counts = [f"{report.unused}", f"{report.round_trip_failures}"]
        table.append([report.name, f"{report.vocab_size}", report.encoder, *rates, *counts])
    return table


GROUP_METRICS = {
    "bytes_per_token": "bytes/token",
    "fertility": "tokens/word",
    "parity": "parity",
    "byte_fallback": "byte tokens",
    "pieces": "pieces used",
}


def group_rows(reports: Sequence[TokenizerReport], metric: str) -> list[list[str]]:
    """A table of one of GROUP_METRICS: a row per language or source, a column per tokenizer, after a header."""
    table = [[GROUP_METRICS[metric], "documents", *(report.name for report in reports)]]
    for number, group in enumerate(reports[0].groups):
        values = [getattr(report.groups[number], metric) for report in reports]
        table.append([group.group, f"{group.documents}", *(_format_value(metric, value) for value in values)])
    return table


def _format_value(metric: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value}" if metric == "pieces" else f"{value:.2%}" if metric == "byte_fallback" else f"{value:.2f}"


def _split(texts: Sequence[ReportText]) -> tuple[list[ReportText], list[ReportText]]:
    is_held_out = [key_of("compare", text.key or text.text) % HELD_OUT_MODULUS == 0 for text in texts]
    training = [text for text, out in zip(texts, is_held_out, strict=True) if not out]
    return training, [text for text, out in zip(texts, is_held_out, strict=True) if out]


def _train(preset: str, texts: Sequence[ReportText], folder: Path, vocab_size: int) -> Tokenizer:
    config = TokenizerConfig(**STRATEGIES[preset], vocab_size=vocab_size)
    plain = [text.text for text in texts]
    if config.algorithm == "byte_bpe":
        content = train_byte_level(count_texts(plain, byte_level=True), plain, config)
        write_json(folder / preset, content, END_OF_DOCUMENT)
    else:
        write_atomic(folder / preset / MODEL_NAME, train(plain, config))
    return load_tokenizer(folder / preset)


def _corpus_texts(corpus: Path) -> list[ReportText]:
    sources = sorted({path.name.rsplit("-", 1)[0] for path in (corpus / "documents" / "train").glob("*.parquet")})
    texts = []
    for source in sources:
        for part in document_ranges(corpus, "train", source):
            table = read(part, "text", "language")
            pairs = zip(table["text"].to_pylist(), table["language"].to_pylist(), strict=True)
            texts += [ReportText(language or source, text) for text, language in pairs if text]
    return texts


def _file_texts(path: Path) -> list[ReportText]:
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder")
    source = SourceConfig(name="texts", format="jsonl", paths=(str(path),))
    raw = RawFile(name=str(path), bytes=path.stat().st_size, sha256=file_digest(path))
    records = [record for record in read_range(FileRange(raw, str(path)), source) if isinstance(record, Record)]
    return [
        ReportText(
            record.language or "unknown", record.text, "/".join(str(record.metadata.get("path", "")).split("/")[-2:])
        )
        for record in records
        if record.text
    ]


# Ranks tokenizers by the bits per byte of small models trained on equal bytes of text, with intervals over seeds.

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval by Student's t); NaN for the width of one value.

    2.0, 2.1, 2.2 -> 2.1 and 4.303 * 0.1 / sqrt(3) = 0.248."""
    from scipy.stats import t  # slow to load, and only for rankings

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, math.nan
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def ranking_rows(reports: Sequence[TokenizerReport]) -> list[list[str]]:
    """From the fewest bits per byte to the most, after a header. The last column is the difference to the first row,
    whose interval is over pairs of equal seeds: a tokenizer whose interval excludes 0 is worse."""
    trained = sorted(_trained(reports), key=lambda named: statistics.mean(named[1].total))
    table = [["rank", "tokenizer", "bits/byte (95 % interval)", "seeds", "above the first (95 % interval)"]]
    best = trained[0][1].total
    for rank, (name, bits) in enumerate(trained, start=1):
        differences = [bits_of_seed - first for bits_of_seed, first in zip(bits.total, best, strict=True)]
        above = "" if rank == 1 else _ranking_cell(interval(differences))
        table.append([str(rank), name, _ranking_cell(interval(bits.total)), str(len(bits.total)), above])
    return table


def ranking_by_group(reports: Sequence[TokenizerReport]) -> list[list[str]]:
    """Bits per byte of each language: a column per tokenizer, after a header; * marks the fewest."""
    trained = _trained(reports)
    table = [["bits/byte", *(name for name, _ in trained)]]
    for group in trained[0][1].groups:
        intervals = [interval(bits.groups[group]) for _, bits in trained]
        fewest = min(mean for mean, _ in intervals)
        table.append([group, *(_ranking_cell(cell) + ("*" if cell[0] == fewest else "") for cell in intervals)])
    return table


def _trained(reports: Sequence[TokenizerReport]) -> list[tuple[str, ModelBitsPerByte]]:
    return [(report.name, report.bits_per_byte) for report in reports if report.bits_per_byte is not None]


def _ranking_cell(mean_and_half: tuple[float, float]) -> str:
    mean, half = mean_and_half
    return f"{mean:.4f}" if math.isnan(half) else f"{mean:.4f} ± {half:.4f}"
