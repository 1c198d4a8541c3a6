"""The steps of `gristmill init`: survey, rehearsal of curation, choice of the size, rehearsal of training, recipe."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import text_hashes
from gristmill.data_pipeline.corpus.splits import SPLITS, split_indices
from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.read import CONVERTERS
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.manifest import LOG_FOLDER, read_manifest
from gristmill.foundation.progress import ProgressMeter, Reporter
from gristmill.pipelines.init import dial
from gristmill.pipelines.init.dial import Choice, Setting, TrainingRehearsal
from gristmill.pipelines.init.recipe import (
    FIRST_SEED,
    FORECAST_MARK,
    PlannedSource,
    RecipePlan,
    largest_vocabulary,
    plan_sources,
    smallest_vocabulary,
)
from gristmill.pipelines.init.survey import COMPRESSED, Survey, content_bytes, counted, survey
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.runner import TIMES_NAME

VOCABULARIES = ((1e5, 384), (1e6, 1024), (1e7, 2048), (1e8, 4096), (float("inf"), 8192))  # up to so many bytes of text
DEFAULT_MINUTES = 30.0
REHEARSED_SECONDS = 8.0  # of training steps
MIN_REHEARSED_STEPS, MAX_REHEARSED_STEPS = 12, 400
MAX_STEP_SECONDS = 5.0  # steps that take longer are not rehearsed: their measured rate is near enough for such a run


class Dial(Protocol):
    """The user's choice of the size; at most one is set."""

    @property
    def minutes(self) -> float | None: ...
    @property
    def depth(self) -> int | None: ...
    @property
    def budget(self) -> float | None: ...


def write_first_recipe(
    folder: Path, path: Path, name: str, size: Dial, reporter: Reporter, show: Callable[[str], None]
) -> Choice:
    """Writes the commented recipe of the folder's files to `path`. show: takes a line for each source and for what is
    unused. Raises InputError where the files give no recipe."""
    reporter.info(f"looking at the files of {folder}")
    looked = survey(folder)
    sources = plan_sources(looked.groups)
    for line in summary(looked, sources):
        show(line)
    rough_bytes = sum(source.text_bytes for source in sources)
    usual = next(pieces for limit, pieces in VOCABULARIES if rough_bytes < limit)
    vocabulary = max(min(usual, largest_vocabulary(sources)), smallest_vocabulary(sources))
    rehearsed_plan = RecipePlan("rehearsal", None, sources, rough_bytes)
    with tempfile.TemporaryDirectory(prefix="gristmill-init-") as temporary:
        work = Path(temporary)
        curation = rehearse_curation(
            sources, partial(_write_curation, rehearsed_plan, vocabulary, work), work, reporter
        )
        before = {"start": curation.start, **curation.stages}
        setting = Setting(
            curation.text_bytes,
            curation.text_tokens,
            vocabulary,
            rehearsed_plan.precision,
            sum(before.values()) + dial.EVALUATION_SECONDS,
            reporter.info,
        )
        with reporter.meter("measuring how fast this machine trains", 1, "measurements") as meter:
            choice = choose(size, setting)
            meter.advance()
        if choice.batch_tokens / choice.tokens_per_second <= MAX_STEP_SECONDS:
            choice = rehearse(choice, setting, before, work, _minutes(size), reporter)
    plan = replace(rehearsed_plan, name=name, root=folder, text_bytes=curation.text_bytes, seed=curation.seed)
    write_atomic(path, plan.text(choice).encode())
    return choice


def _minutes(size: Dial) -> float | None:
    """The time that decides the size; None if the depth or the operations decide it."""
    return (size.minutes or DEFAULT_MINUTES) if size.depth is None and size.budget is None else None


def choose(size: Dial, setting: Setting) -> Choice:
    if size.depth is not None:
        return dial.choose_by_depth(size.depth, setting)
    if size.budget is not None:
        return dial.choose_by_flops(size.budget, setting)
    return dial.choose_by_minutes(size.minutes or DEFAULT_MINUTES, setting)


def _write_curation(
    plan: RecipePlan, vocabulary: int, folder: Path, sources: Sequence[PlannedSource], seed: int
) -> Path:
    path = folder / "curation.yaml"
    part = replace(plan, sources=sources, seed=seed)
    path.write_text(part.curation_text() + part.tokenizer_text(vocabulary), "utf-8")
    return path


def rehearse(
    choice: Choice, setting: Setting, before: Mapping[str, float], work: Path, minutes: float | None, reporter: Reporter
) -> Choice:
    """The choice after some steps of its training, an evaluation and a report on what was curated in `work`."""
    steps = int(REHEARSED_SECONDS * choice.tokens_per_second / choice.batch_tokens)
    steps = min(max(steps, MIN_REHEARSED_STEPS), MAX_REHEARSED_STEPS, choice.tokens // choice.batch_tokens)
    short = replace(choice, tokens=steps * choice.batch_tokens)
    curated = (work / "curation.yaml").read_text("utf-8")
    recipe = work / "training.yaml"
    recipe.write_text(curated + RecipePlan("rehearsal", None, (), setting.text_bytes).training_text(short), "utf-8")
    training = rehearse_training(recipe, work, reporter, f"{steps} steps of training, and evaluation")
    return dial.rehearsed(choice, setting, before, training, minutes)


def summary(looked: Survey, sources: Sequence[PlannedSource]) -> list[str]:
    """A line for each source, and for what is not used."""
    lines = []
    for source in sources:
        languages = ", ".join(f"{code} {share:.0%}" for code, share in source.languages) or "no language detected"
        filters = "Gopher's filters" if source.filters else "no filters"
        field = f"field {source.group.field}, " if source.group.field else ""
        lines.append(
            f"{source.name}: {counted(len(source.group.paths), 'files')}, {source.group.num_bytes / 1e6:.2f} MB, "
            f"{field}{languages}; {filters} ({source.kept:.0%} of a sample of {source.num_sampled} kept)"
        )
        if problems := source.group.problems:
            lines.append(f"  {len(problems)} of the sample cannot be read, the first: {problems[0]}")
    for group in looked.groups:
        if not any(source.group is group for source in sources):
            files = counted(len(group.paths), "files")
            lines.append(f"not used: {group.kind}, {files} such as {group.paths[0]}: too little text")
    lines += [f"not used: {counted(number, why)}, such as {path}" for why, (number, path) in looked.unused.items()]
    return lines


# A short rehearsal of a recipe's run on part of the user's files: seconds of each stage, and how much text is kept.
#
# The rehearsal runs the commands that the user will run, in processes of their own, so that the forecast holds what a
# model of the machine would miss: libraries that load, kernels that compile, filters, extraction, evaluation.

TEXT_BYTES = 4e6  # of text that the rehearsal reads, by the estimate of the sources
MIN_RAW_BYTES, MAX_RAW_BYTES = 6e6, 24e6  # of the files' content that it reads
SMALL_SHARE = 0.25  # of that for the first rehearsal, which tells the fixed seconds from those by size
WARM_STEPS = 3  # the first steps allocate memory
# Where a record begins, and the bytes of the mark that belong to the one before; other formats are cut at a line end.
RECORD_STARTS = {
    "warc": (b"\r\n\r\nWARC/1.", 4),
    "wet": (b"\r\n\r\nWARC/1.", 4),
    "arc": (b"\nhttp", 1),
    "mediawiki": (b"</page>", 7),
    "stack_exchange": (b"/>", 2),
}
ENDS = {"mediawiki": b"</mediawiki>", "stack_exchange": b"</posts>"}  # of the whole file
CURATION = ("curate", "tokenizer", "index")
MAX_SEEDS = 1000  # of three documents one seed in fifteen gives each split one


@dataclass(frozen=True)
class StageCost:
    """Seconds of a stage: fixed + per_byte * bytes of the raw files' content."""

    fixed: float
    per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.fixed + self.per_byte * num_bytes


@dataclass(frozen=True)
class CurationRehearsal:
    """start: seconds of a command beside its stages. stages: of curate, tokenizer and index, for all files. text_bytes,
    text_tokens: of the training text that will be kept of all files. seed: of the recipe, which decides what is held
    out."""

    start: float
    stages: Mapping[str, float]
    text_bytes: float
    text_tokens: float
    seed: int = FIRST_SEED


def rehearsed_sources(sources: Sequence[PlannedSource], folder: Path, share: float = 1.0) -> list[PlannedSource]:
    """The sources with files of about TEXT_BYTES together, spread over each source. A file that is larger than its part
    is cut, into `folder`."""
    raw = sum(source.group.num_bytes for source in sources)
    text = sum(source.text_bytes for source in sources)
    limit = min(max(TEXT_BYTES * raw / max(text, 1.0), MIN_RAW_BYTES), MAX_RAW_BYTES) * share
    return [_part(source, limit * source.group.num_bytes / raw, folder) for source in sources]


def _part(source: PlannedSource, limit: float, folder: Path) -> PlannedSource:
    group = source.group
    if group.num_bytes <= limit:
        return source
    chosen: list[Path] = []
    num_bytes = 0.0
    step = max(1, int(group.num_bytes / limit))
    for path in chain.from_iterable(group.paths[first::step] for first in range(step)):
        if chosen and num_bytes + content_bytes(path) > 1.2 * limit:
            break
        if content_bytes(path) > 1.5 * limit:
            path = _head_of(path, group.format, int(limit), folder / source.name)
        chosen.append(path)
        num_bytes += content_bytes(path)
        if num_bytes >= limit:
            break
    return replace(source, group=replace(group, paths=tuple(sorted(chosen)), num_bytes=int(num_bytes)))


def _head_of(path: Path, format: str, limit: int, folder: Path) -> Path:
    """A file of the first records of `path`, about `limit` bytes; the file itself where it cannot be cut."""
    folder.mkdir(parents=True, exist_ok=True)
    name = path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    head = folder / name
    if format == "parquet":
        return _first_row_groups(path, limit, head)
    if format in ("html", *CONVERTERS):
        return path
    content = b""
    with path.open("rb") as file, suppress(Damaged):
        for block in blocks(file, str(path)):
            content += block
            if len(content) >= limit:
                break
    mark, ending = RECORD_STARTS.get(format, (b"\n", 1))
    end = content.rfind(mark, 0, limit)
    if end <= 0:
        return path
    head.write_bytes(content[: end + ending] + ENDS.get(format, b""))
    return head


def _first_row_groups(path: Path, limit: int, head: Path) -> Path:
    with pq.ParquetFile(path) as file:
        share = limit / max(1, path.stat().st_size)
        count = max(1, int(file.num_row_groups * share))
        rows = max(1, int(file.metadata.num_rows * share))
        table = file.read_row_groups(list(range(count)))
        pq.write_table(table.slice(0, rows), head, compression="zstd")
    return head


def rehearse_curation(
    sources: Sequence[PlannedSource],
    write_recipe: Callable[[Sequence[PlannedSource], int], Path],
    folder: Path,
    reporter: Reporter,
) -> CurationRehearsal:
    """Runs curate, tokenizer and index on a part of the files, and on a quarter of it to tell the fixed seconds. Leaves
    the first run in folder/work, where training is rehearsed. write_recipe(sources, seed): its recipe."""
    part = rehearsed_sources(sources, folder)
    raw, whole = _raw_bytes(part), _raw_bytes(sources)
    label = f"curating {raw / 1e6:.2f} MB"
    recipe = write_recipe(part, FIRST_SEED)
    seconds, start = run_recipe(recipe, folder / "work", "index", reporter, label)
    seed = seed_that_holds_out(folder / "work" / "curate", recipe)
    if seed != FIRST_SEED:  # quicker than the first time, since results are kept
        run_recipe(write_recipe(part, seed), folder / "work", "index", reporter, label)
    costs = {name: StageCost(seconds[name], 0.0) for name in CURATION}
    if raw < whole:
        small = rehearsed_sources(sources, folder / "small", SMALL_SHARE)
        label = f"curating {_raw_bytes(small) / 1e6:.2f} MB"
        less, _ = run_recipe(write_recipe(small, seed), folder / "small" / "work", "index", reporter, label)
        costs = {name: _cost(less[name], seconds[name], _raw_bytes(small), raw) for name in CURATION}
    kept = read_manifest(folder / "work" / "curate").metadata["sources"]
    tokens = read_manifest(folder / "work" / "index").metadata["tokens"]["train"]
    train_bytes = {name: entry["kept"].get("train", {"bytes": 0})["bytes"] for name, entry in kept.items()}
    growth = {
        source.name: source.group.num_bytes / max(1, sampled.group.num_bytes)
        for source, sampled in zip(sources, part, strict=True)
    }
    return CurationRehearsal(
        start,
        {name: cost.seconds(whole) for name, cost in costs.items()},
        sum(train_bytes[name] * growth[name] for name in train_bytes),
        sum(tokens.get(name, 0) * growth[name] for name in growth),
        seed,
    )


def seed_that_holds_out(corpus: Path, recipe: Path) -> int:
    """The first seed by which no split of the recipe is without a document: of 25 documents, 0.15 of them for the test,
    none is held out for it by one seed in sixty. FIRST_SEED where none of MAX_SEEDS does. corpus: curated by it."""
    kept = [source["kept"] for source in read_manifest(corpus).metadata["sources"].values()]
    if all(any(split in of_source and of_source[split]["documents"] for of_source in kept) for split in SPLITS):
        return FIRST_SEED
    texts = [text for path in sorted((corpus / "documents").rglob("*.parquet")) for text in _texts(path)]
    hashes = text_hashes(TextBuffer.of(texts))
    splits, seeds = load_recipe(str(recipe)).curate.splits, range(FIRST_SEED, FIRST_SEED + MAX_SEEDS)
    return next((seed for seed in seeds if len(set(split_indices(hashes, splits, seed))) == len(SPLITS)), FIRST_SEED)


def _texts(path: Path) -> list[str]:
    return pq.read_table(path, columns=["text"])["text"].to_pylist()


def _cost(less: float, more: float, small: float, large: float) -> StageCost:
    """(1 s for 1 MB, 2.5 s for 4 MB) -> 0.5 s and 0.5 s a MB."""
    per_byte = max(0.0, (more - less) / max(1.0, large - small))
    return StageCost(max(0.0, more - per_byte * large), per_byte)


def _raw_bytes(sources: Sequence[PlannedSource]) -> int:
    return sum(source.group.num_bytes for source in sources)


def rehearse_training(recipe: Path, folder: Path, reporter: Reporter, label: str) -> TrainingRehearsal:
    """Trains a few steps, evaluates and reports in the folder where curation was rehearsed."""
    work = folder / "work"
    seconds, _ = run_recipe(recipe, work, None, reporter, label)
    lines = (work / "train" / LOG_FOLDER / "timing.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    warm = [1 / step["tokens_per_second"] for step in steps[WARM_STEPS:]]
    rate = 1 / fmean(warm)
    tokens = read_manifest(work / "train").metadata["tokens"]
    return TrainingRehearsal(
        rate,
        max(0.0, seconds["train"] - tokens / rate),
        {name: seconds[name] for name in ("evaluate", "report")},
    )


def run_recipe(
    recipe: Path, workdir: Path, to: str | None, reporter: Reporter, label: str
) -> tuple[dict[str, float], float]:
    """(seconds of each stage that ran, seconds of the command beside them). Raises InputError with what the command
    says if it fails."""
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "run", str(recipe), "--workdir", str(workdir)]
    times = workdir / LOG_FOLDER / TIMES_NAME
    before = len(_lines(times))
    started = time.monotonic()
    with reporter.meter(f"rehearsal: {label}", 3, "stages") as meter:
        _run([*command, *(["--to", to] if to else [])], meter)
    elapsed = time.monotonic() - started
    seconds = {line["stage"]: line["seconds"] for line in map(json.loads, _lines(times)[before:])}
    return seconds, max(0.0, elapsed - sum(seconds.values()))


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines() if path.exists() else []


def _run(command: Sequence[str], meter: ProgressMeter) -> None:
    """Runs the command; each stage that begins advances the meter."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = list(_stages(process, meter))
    if process.returncode:
        trouble = next((line for line in reversed(said) if line.startswith("gristmill: ")), "; ".join(said[-3:]))
        raise InputError(f"the run failed on part of the files: {trouble.removeprefix('gristmill: ')}")


def _stages(process: "subprocess.Popen[str]", meter: ProgressMeter) -> Iterator[str]:
    for line in process.stderr or ():
        stage, _, rest = line.partition(": ")
        if rest.startswith("run ("):
            meter.advance(1, stage)
        yield line.rstrip("\n")


def read_forecast(recipe: str) -> dict[str, Any]:
    """The forecast that `init` wrote into the text of a recipe, seconds by stage; {} if there is none."""
    marks = [line for line in recipe.splitlines() if line.startswith(FORECAST_MARK)]
    return json.loads(marks[0].removeprefix(FORECAST_MARK)) if marks else {}
