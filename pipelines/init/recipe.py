"""The recipe of a folder: which filters its documents pass, and the commented YAML that `gristmill run` takes."""

import glob
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import LanguageConfig, detect_buffer
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.init.dial import SCHEDULE, Choice, optimizer_of
from gristmill.pipelines.init.survey import COMPRESSED, FileGroup, counted

PASSING_SHARE = 0.5  # of the sampled documents that a filter has to keep to be chosen
TEXT_SHARE = {
    "html": 0.12,
    "warc": 0.04,
    "wet": 0.9,
    "arc": 0.04,
    "mbox": 0.5,
    "parquet": 2.0,
    "csv": 0.8,
    "jsonl": 0.9,
    "mediawiki": 0.25,
    "stack_exchange": 0.6,
}
PROSE: list[dict[str, Any]] = [{"gopher_quality": {}}]
CODE = [{"gopher_quality": {"alpha_word_ratio": None, "hash_word_ratio": None, "min_stop_words": None,
                            "min_mean_word_length": None}}]  # fmt: skip
MIN_DOCUMENTS = 40  # fewer files are cut into paragraphs, so that some can be held out
MIN_CLOZE_BYTES = 1_500_000
FIRST_SEED = 1
FORECAST_MARK = "# seconds by stage: "
MIN_LANGUAGE_SHARE = 0.01  # of the sampled documents, for a language to be named
VOCABULARY_SHARE = 0.5  # of the most pieces that the sampled words can make
MIN_SOURCE_BYTES = 4000  # of text: less has no sample of the model's sequence length once some is held out


@dataclass(frozen=True)
class PlannedSource:
    """kept: share of the num_sampled documents that curation keeps. languages: the commonest first, with their
    shares."""

    name: str
    group: FileGroup
    filters: list[dict[str, Any]]
    record: str
    kept: float
    duplicates: float
    num_sampled: int
    languages: tuple[tuple[str, float], ...]

    @property
    def text_bytes(self) -> float:
        """Estimated text that curation keeps."""
        share = self.group.text_share
        if share is None:
            share = TEXT_SHARE.get(self.group.kind, 1.0) * (0.2 if self.group.is_html else 1.0)
        return self.group.num_bytes * share * self.kept


def plan_sources(groups: Sequence[FileGroup]) -> list[PlannedSource]:
    """Each group with the filters that most of its sample passes; groups of which nothing is kept are left out."""
    names = _names(groups)
    planned = []
    for name, group in zip(names, groups, strict=True):
        record, texts = "file", list(group.texts)
        if group.format in ("text", "markdown") and len(group.paths) < MIN_DOCUMENTS:
            record = "paragraph"
            texts = [piece for text in texts for piece in text.split("\n\n") if piece.strip()][:2000]
        candidates: list[list[dict[str, Any]]] = [CODE, []] if group.kind in ("code", "ipynb") else [PROSE, []]
        for filters in candidates:
            kept, duplicates = _curated_share(texts, filters)
            if kept >= PASSING_SHARE or not filters:
                break
        if kept > 0:
            planned.append(PlannedSource(name, group, filters, record, kept, duplicates, len(texts), _languages(texts)))
    large = [source for source in planned if source.text_bytes >= MIN_SOURCE_BYTES]
    if not large:
        total = sum(source.text_bytes for source in planned)
        raise InputError(
            f"about {total:.0f} bytes of text are left after curation, and a source needs at least {MIN_SOURCE_BYTES}; "
            "add more text to the folder"
        )
    return large


def largest_vocabulary(sources: Sequence[PlannedSource]) -> int:
    """Pieces that a tokenizer of the sampled texts can have with room to spare: each merge needs a new pair of pieces
    inside a word, so there are fewer than characters of distinct words, beside 256 bytes and the characters."""
    words = {word for source in sources for text in source.group.texts[:500] for word in text[:20_000].split()}
    pairs = sum(len(word) - 1 for word in words)
    return max(320, int(VOCABULARY_SHARE * (256 + len(set().union(*words)) + pairs)))


def smallest_vocabulary(sources: Sequence[PlannedSource]) -> int:
    """Pieces for each byte, for each character of the sampled texts (Chinese has thousands), and for others."""
    characters = {character for source in sources for text in source.group.texts for character in text}
    return 272 + int(1.3 * len(characters))


def _names(groups: Sequence[FileGroup]) -> list[str]:
    """jsonl, jsonl_2, ...: by format, numbered where there are several."""
    counts: dict[str, int] = defaultdict(int)
    names = []
    for group in groups:
        counts[group.kind] += 1
        names.append(group.kind if counts[group.kind] == 1 else f"{group.kind}_{counts[group.kind]}")
    return names


def _curated_share(texts: Sequence[str], filters: list[dict[str, Any]]) -> tuple[float, float]:
    """(share kept, share of exact duplicates) of the texts by the curation that the recipe will run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sample.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
        source = SourceConfig(name="sample", format="jsonl", paths=(str(path),))
        engine = LocalEngine(1, Reporter.silent())
        lock = Lock(sources=tuple(resolve([source], engine)))
        config = CurateConfig(filters=tuple(filters), near_dedup=None, splits={"validation": 0, "test": 0})  # type: ignore[arg-type]
        try:
            inputs = CurationInputs([source], config, 0, lock, Path(folder, "out"), Path(folder, "cache"), engine)
            counts = curate(inputs)["sources"]["sample"]
        except InputError:  # nothing is kept
            return 0.0, 0.0
        removed = counts.get("removed", {}).get("exact_dedup", {}).get("documents", 0)
        kept = sum(split["documents"] for split in counts["kept"].values())
        return kept / len(texts), removed / len(texts)


def _languages(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    detected = detect_buffer(TextBuffer.of(list(texts)), LanguageConfig()).column("detected_language").to_pylist()
    shares = {code: detected.count(code) / len(detected) for code in set(detected) if code}
    common = [item for item in shares.items() if item[1] >= MIN_LANGUAGE_SHARE]
    return tuple(sorted(common, key=lambda item: (-item[1], item[0]))[:4])


def globs(paths: Sequence[Path], root: Path) -> list[str]:
    """Patterns that match these files and no others of the folder: whole suffixes below the root or in a folder, where
    all such files are meant, else the files by name."""
    meant = set(paths)
    by_suffix: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        by_suffix[_whole_suffix(path)].append(path)
    patterns = []
    for suffix, files in sorted(by_suffix.items()):
        if suffix and all(path in meant for path in _with_suffix(root, suffix)):
            patterns.append(f"{glob.escape(str(root))}/**/*{suffix}")
            continue
        for folder in sorted({path.parent for path in files}):
            inside = [path for path in files if path.parent == folder]
            others = [p for p in folder.iterdir() if p.is_file() and p.name.endswith(suffix) and p not in meant]
            if suffix and not others:
                patterns.append(f"{glob.escape(str(folder))}/*{suffix}")
            else:
                patterns += [glob.escape(str(path)) for path in inside]
    return patterns


def _whole_suffix(path: Path) -> str:
    """.jsonl.gz of a.b.jsonl.gz."""
    suffixes = path.suffixes
    return "".join(suffixes[-2:]) if path.suffix in COMPRESSED and len(suffixes) > 1 else path.suffix


def _with_suffix(root: Path, suffix: str) -> list[Path]:
    matching = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        matching += [Path(folder, name) for name in files if name.endswith(suffix) and not name.startswith(".")]
    return matching


@dataclass(frozen=True)
class RecipePlan:
    """root: the folder of the files; None where the recipe names each file. text_bytes: of the text that is kept."""

    name: str
    root: Path | None
    sources: Sequence[PlannedSource]
    text_bytes: float
    precision: str = "bf16"
    seed: int = FIRST_SEED

    @property
    def splits(self) -> tuple[float, float]:
        """Shares of documents for validation and test."""
        return (0.02, 0.05) if self.text_bytes > 3e6 else (0.1, 0.15)

    @property
    def tasks(self) -> str:
        has_prose = any(source.filters == PROSE for source in self.sources)
        has_cloze = has_prose and self.text_bytes * self.splits[1] > MIN_CLOZE_BYTES * 0.05
        return "bits_per_byte, cloze" if has_cloze else "bits_per_byte"

    def curation_text(self) -> str:
        """The sections up to the curated corpus. Strings are written as JSON, which YAML reads."""
        lines = [f"name: {self.name}", f"seed: {self.seed}", "", "sources:"]
        for source in self.sources:
            lines += _source_lines(source, self.root)
        lines += [
            "",
            "curate:",
            "  profiles: gristmill  # filter thresholds by language",
            f"  splits: {{validation: {self.splits[0]}, test: {self.splits[1]}}}  # held out of training",
        ]
        return "\n".join(lines) + "\n"

    def tokenizer_text(self, vocabulary: int) -> str:
        return f"\ntokenizer: {{vocab_size: {vocabulary}, sample_bytes: 16M}}\n"

    def training_text(self, choice: Choice) -> str:
        steps = choice.tokens // choice.batch_tokens
        lines = [
            "",
            f"# {choice.size.parameters / 1e6:.2f}M parameters; width 64 x depth",
            f"model: {_flow(choice.size.fields)}",
            "",
            "train:",
            f"  tokens: {choice.tokens}",
            f"  batch_tokens: {choice.batch_tokens}",
            f"  precision: {self.precision}",
            f"  optimizer: {_flow(optimizer_of(choice.size))}",
            f"  lr_schedule: {_flow(SCHEDULE)}",
            f"  validation: {{every: {max(1, steps // 8)}, samples: 16}}",
            f"  checkpoint: {{every: {max(1, steps // 3)}}}",
            f"  monitoring: {{noise_scale_every: {max(1, steps // 20)}}}  # tells the largest batch that pays",
            "",
            f"evaluate: {{tasks: [{self.tasks}], text_bytes: 100k, num_continuations: 3}}",
        ]
        return "\n".join(lines) + "\n"

    def text(self, choice: Choice) -> str:
        """The whole commented recipe."""
        seconds = {stage: round(value, 1) for stage, value in choice.seconds.items()}
        heading = [
            f"# Written by `gristmill init` for {self.root}. Change what you like; `gristmill check {self.name}.yaml` "
            "tells errors.",
            f"# About {self.text_bytes / 1e6:.1f} MB of text are kept; the run takes about "
            f"{duration(choice.total_seconds)} here, by a rehearsal of it:",
            f"{FORECAST_MARK}{json.dumps(seconds)}",
            f"# {choice.why};",
            f"# {choice.flops:.1e} floating-point operations at {choice.tokens_per_second:,.0f} tokens a second.",
            "# Then: gristmill run, then gristmill chat.",
        ]
        sections = self.curation_text() + self.tokenizer_text(choice.size.vocabulary) + self.training_text(choice)
        return "\n".join(heading) + "\n" + sections


def _source_lines(source: PlannedSource, root: Path | None) -> list[str]:
    group = source.group
    languages = ", ".join(f"{code} {share:.0%}" for code, share in source.languages) or "no language detected"
    paths = globs(group.paths, root) if root is not None else [glob.escape(str(path)) for path in group.paths]
    lines = [
        f"  # {counted(len(group.paths), 'files')}, {group.num_bytes / 1e6:.2f} MB; {languages}; of the sample "
        f"{source.kept:.0%} are kept, {source.duplicates:.0%} are copies",
        f"  - name: {source.name}",
        *(f"    {key}: {json.dumps(value)}" for key, value in group.config.items()),
        f"    paths: {json.dumps(paths, ensure_ascii=False)}",
    ]
    if source.record != "file":
        lines.append(f"    record: {source.record}  # few files: their paragraphs are the documents")
    return [*lines, f"    filters: {json.dumps(source.filters)}  # {_filter_reason(source)}"]


def _filter_reason(source: PlannedSource) -> str:
    if source.filters == PROSE:
        return "prose: the Gopher rules"
    if source.filters == CODE:
        return "code: the Gopher rules on length"
    return "most documents fail the Gopher rules, which were made for web prose"


def _flow(fields: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in fields.items()) + "}"


def duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.1f} minutes"
        if seconds < 5400
        else f"{seconds / 3600:.1f} hours"
    )
