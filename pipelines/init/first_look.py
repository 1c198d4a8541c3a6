"""The steps of `gristmill init`: survey, rehearsal of curation, choice of the size, rehearsal of training, recipe."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from gristmill.foundation.files import write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.init import dial, rehearsal
from gristmill.pipelines.init.dial import Choice, Setting
from gristmill.pipelines.init.recipe import (
    PlannedSource,
    RecipePlan,
    largest_vocabulary,
    plan_sources,
    smallest_vocabulary,
)
from gristmill.pipelines.init.survey import Survey, counted, survey

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
    reporter.say(f"looking at the files of {folder}")
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
        curation = rehearsal.rehearse_curation(
            sources, partial(_write_curation, rehearsed_plan, vocabulary, work), work, reporter
        )
        before = {"start": curation.start, **curation.stages}
        setting = Setting(
            curation.text_bytes,
            curation.text_tokens,
            vocabulary,
            rehearsed_plan.precision,
            sum(before.values()) + dial.EVALUATION_SECONDS,
            reporter.say,
        )
        with reporter.meter("measuring how fast this machine trains", 1, "measurements") as meter:
            choice = choose(size, setting)
            meter.advance()
        if choice.batch_tokens / choice.tokens_per_second <= MAX_STEP_SECONDS:
            choice = rehearse(choice, setting, before, work, _minutes(size), reporter)
    plan = replace(rehearsed_plan, name=name, root=folder, text_bytes=curation.text_bytes)
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


def _write_curation(plan: RecipePlan, vocabulary: int, folder: Path, sources: Sequence[PlannedSource]) -> Path:
    path = folder / "curation.yaml"
    part = replace(plan, sources=sources)
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
    training = rehearsal.rehearse_training(recipe, work, reporter, f"{steps} steps of training, and evaluation")
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
