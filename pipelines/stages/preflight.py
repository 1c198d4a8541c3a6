"""Preflight checks: finds errors of a recipe in seconds, before work starts, and reports all of them at once.

Each check belongs to one stage and yields issues; complete stages and stages that will not run are not checked."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gristmill.data_pipeline.curate_config import check_filters
from gristmill.data_pipeline.indexed.draws import epochs_by_source, repeat_warnings
from gristmill.data_pipeline.quality.scores import LABELS_PREFIX, PREFIX, locked_labels, locked_scores
from gristmill.data_pipeline.readers.files import check_kinds
from gristmill.data_pipeline.readers.python_records import reader_of
from gristmill.data_pipeline.readers.read import locate
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.evaluation.inference.config import RECALL_TASKS, EvaluateConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_address
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.startup import DeferredModule, block_pandas_import, host_bytes
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages import index
from gristmill.pipelines.stages.stage import Stage, check_stage_folder
from gristmill.pipelines.stages.training_data import needs_sources
from gristmill.pipelines.workdir import raw_files
from gristmill.training.config.train import TRACKER_PACKAGES
from gristmill.training.objectives.objective_names import SCORED_BY_TASKS
from gristmill.training.planner.layout_checks import validation_errors

# For recipes that get as far as these stages.
memory = DeferredModule("gristmill.training.planner.memory")
planner = DeferredModule("gristmill.training.planner.command")
hardware = DeferredModule("gristmill.training.planner.hardware")
objectives = DeferredModule("gristmill.training.objectives.load_objective")
pretrained = DeferredModule("gristmill.tokenizers.pretrained")

HELD_OUT_TASKS = ("bits_per_byte", "cloze")
# A cloze question has a context of at most 500 bytes and choices of 20 to 160, wrong ones up to 1.5 times as long
# (evaluation/tasks/corpus_tasks.py). English text has about 4 bytes a token at 8,000 pieces or more, 5 at 100,000 and
# more.
MAX_QUESTION_BYTES, MIN_QUESTION_BYTES = 740, 80
TYPICAL_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN = 4, 5
MARKUP_FORMATS = ("html", "warc", "arc")  # a few per cent of the bytes are text
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".parquet")
COMPRESSED_RATIO = 3  # gzip and zstd compress English text to about a third
UNKNOWN_VOCABULARY = 10**6  # of a pretrained tokenizer, which is read later: no layout is refused for its vocabulary


@dataclass(frozen=True)
class Issue:
    """error: the exception to raise, or None for a warning."""

    text: str
    error: type[RecipeError] | type[InputError] | None = RecipeError


def require_ready(recipe: Recipe, stages: Sequence[Stage], workdir: Path, world_size: int, reporter: Reporter) -> None:
    """Prints the warnings. Raises RecipeError or InputError with all other issues, one per line."""
    issues = preflight(recipe, [stage for stage in stages if not is_complete(stage, recipe, workdir)], world_size)
    for issue in issues:
        if issue.error is None:
            reporter.info(f"warning: {issue.text}")
    raise_issues(issues)


def raise_issues(issues: Sequence[Issue]) -> None:
    errors = [issue for issue in issues if issue.error is not None]
    if errors:
        kind = RecipeError if any(issue.error is RecipeError for issue in errors) else InputError
        raise kind("\n".join(issue.text for issue in errors))


def preflight(recipe: Recipe, stages: Sequence[Stage], world_size: int) -> list[Issue]:
    """All issues for running these stages on world_size processes. Reads the recipe, file names and the files' first
    bytes; writes nothing."""
    block_pandas_import()
    return [issue for stage in stages for check in CHECKS.get(stage.name, ()) for issue in check(recipe, world_size)]


def is_complete(stage: Stage, recipe: Recipe, workdir: Path) -> bool:
    """True if the stage's folder has the same config and code version. (The runner also compares the inputs.)"""
    folder = workdir / stage.name
    if not (folder / MANIFEST_NAME).is_file():
        return False
    try:
        manifest = read_manifest(folder)
        return manifest.code_version == stage.code_version and manifest.config == stage.config(recipe)
    except (InputError, RecipeError):
        return False


def check_workdir(workdir: Path, stages: Sequence[Stage] = ()) -> None:
    """Raises RecipeError if the work folder is a file or a dangling link, InputError if it cannot be written to or one
    of the stages' folders is not of the stage."""
    check_folder(workdir, f"--workdir {workdir}")
    for stage in stages:
        check_stage_folder(stage, workdir)


def check_folder(folder: Path, option: str) -> None:
    """Raises RecipeError or InputError where the folder, which may be absent, cannot hold files. option: as given."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.exists():
        raise RecipeError(f"{option}: {existing} is a symbolic link that leads nowhere; remove it")
    if not existing.is_dir():
        raise RecipeError(f"{option}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{option}: {existing} is not writable (read-only disk or permissions); name another folder")


def _sources(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    """Checks local files; URLs are checked when they are read."""
    for source in recipe.sources:
        if source.format in ("python_docs", "datasets") or any(map(is_address, source.paths)):
            continue
        try:
            check_kinds(source.name, source.format, (location for _, location in locate(source)))
            yield from _sample(source, recipe)
        except InputError as error:
            yield Issue(f"source {source.name}: {str(error).removeprefix(f'source {source.name}: ')}", InputError)


def _sample(source: SourceConfig, recipe: Recipe) -> Iterator[Issue]:
    """Findings from the first records of the source. A source of which none can be read stops the run where it has to
    keep something: alone, or with on_empty: error."""
    sample = raw_files.look_at(source)
    if sample is None:
        return
    wanted = source.languages if source.languages is not None else recipe.curate.languages
    is_fatal = source.on_empty == "error" or len(recipe.sources) == 1
    if (problem := raw_files.problem(sample)) is not None:
        has_wrong_field = any(record.kind == "no_text_field" for record in sample.unreadable)
        yield Issue(problem, InputError if is_fatal or has_wrong_field else None)
    elif recipe.curate.language_id is not None:
        threshold = recipe.curate.language_id.threshold
        if (said := raw_files.excluded_languages(sample, wanted, threshold)) is not None:
            yield Issue(said, None)


def _listed_files(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    decontaminate, near = recipe.curate.decontaminate, recipe.curate.near_dedup
    named = {f"near_dedup.protected: {path}": path for path in (near.protected if near else ())}
    for benchmark in decontaminate.benchmarks if decontaminate else ():
        try:
            named |= {f"decontaminate.benchmarks {benchmark.name}: {path}": path for path in benchmark.files()}
        except InputError as error:
            yield Issue(f"curate.decontaminate.benchmarks: {error}", InputError)
    for name, path in named.items():
        if not path.exists():
            yield Issue(f"curate.{name}: no such file or folder; check the path", InputError)


def _quality_models(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    for read_models in (
        lambda: locked_scores(recipe.curate.quality_scores),
        lambda: locked_labels(recipe.curate.labels),
    ):
        try:
            read_models()
        except (RecipeError, InputError) as error:
            yield Issue(str(error), type(error))


def _user_functions(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    """Loads the user's functions that readers, filters and signals name."""
    for source in recipe.sources:
        try:
            if source.reader is not None:
                reader_of(source)
        except (RecipeError, InputError) as error:
            yield Issue(str(error), type(error))
    for filters in [recipe.curate.filters, *(source.filters for source in recipe.sources if source.filters)]:
        try:
            check_filters(filters, recipe.curate)
        except (RecipeError, InputError) as error:
            yield Issue(str(error), type(error))


def _tokenizer(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    if recipe.tokenizer.pretrained is not None:
        try:
            pretrained.require_pretrained(recipe.tokenizer.pretrained)
        except InputError as error:
            yield Issue(str(error), InputError)


def _layout(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    model, train = recipe.training()
    vocabulary = UNKNOWN_VOCABULARY if recipe.tokenizer.pretrained else recipe.tokenizer.vocab_size
    try:
        hardware.load_hardware(train.layout.hardware)
        if train.layout.auto:
            planner.resolve_layout(model, vocabulary, train, world_size)
            return
    except RecipeError as error:
        yield Issue(f"train.layout: {error}")
        return
    for reason in validation_errors(model, train, vocabulary, world_size):
        yield Issue(f"train.layout: {reason}")
    try:
        memory.check_memory(model, train, vocabulary, max(host_bytes(), memory.LARGEST_DEVICE_BYTES))
    except InputError as error:
        yield Issue(f"model: {error}")


def _start(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    train = recipe.training().train
    named = {"init_from": train.init_from, "teacher": train.teacher.checkpoint if train.teacher else None}
    for field, folder in named.items():
        if folder is None or (Path(folder) / MANIFEST_NAME).is_file():
            continue
        yield Issue(
            f"train.{field}: {folder} is not a checkpoint (no {MANIFEST_NAME}); name a folder like "
            "checkpoints/step-00000100, or make one with `gristmill import`",
            InputError,
        )
    for name in train.monitoring.trackers:
        if find_spec(name) is None:
            yield Issue(
                f"train.monitoring.trackers names {name}, which is not installed; pip install {TRACKER_PACKAGES[name]}"
            )
    if train.objective != "causal":
        yield from _objective(recipe)
    if train.teacher is not None:
        yield from _teacher_vocabulary(recipe, Path(train.teacher.checkpoint) / "model.json")


def _objective(recipe: Recipe) -> Iterator[Issue]:
    """Loads a user's file, checks the options, and reads the records that the options name."""
    train = recipe.training().train
    try:
        objective, options = objectives.check_options(train.objective, train.objective_options)
        if objective.data != "own" and not recipe.sources:
            yield Issue(needs_sources(train.objective, objective.data))
        elif objective.data == "sentence_pairs" and not recipe.index.sentences:
            yield Issue(f"train.objective: {train.objective} draws pairs of sentences; set index.sentences: true")
        symbols = recipe.tokenizer.user_symbols
        missing = [piece for piece in objective.pieces(options) if piece not in symbols]
        if missing and recipe.tokenizer.pretrained is None:
            yield Issue(
                f"train.objective: the tokenizer has no piece {missing[0]!r}; set tokenizer.user_symbols: "
                f"{json.dumps([*symbols, *missing])}"
            )
        objective.check_records(options)
    except (RecipeError, InputError) as error:
        yield Issue(str(error), type(error))


def _teacher_vocabulary(recipe: Recipe, path: Path) -> Iterator[Issue]:
    """The run compares the teacher with the data; a tokenizer that is yet to be trained is compared here."""
    if recipe.tokenizer.pretrained is not None or not path.is_file():
        return
    try:
        size = json.loads(path.read_bytes())["vocab_size"]
    except (ValueError, KeyError, TypeError):
        yield Issue(f"train.teacher: {path}: does not describe a model; take another checkpoint", InputError)
        return
    if size != recipe.tokenizer.vocab_size:
        yield Issue(
            f"train.teacher: its vocabulary has {size} tokens, the recipe asks for {recipe.tokenizer.vocab_size}; set "
            "tokenizer.pretrained to the teacher's tokenizer, or take a teacher that was trained on this one"
        )


def _router(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    """A mixture whose loss does not teach its router: one gate divided by itself is 1 for any scores."""
    model = recipe.model
    if model is None or model.moe is None or not model.moe.normalize_gates:
        return
    if any(layer.top_k == 1 < layer.experts for layer in model.layer_list):
        yield Issue(
            "model.moe: with top_k 1 and normalize_gates every gate is 1, so the loss teaches the router nothing; set "
            "normalize_gates: false, or top_k to 2 or more",
            None,
        )


def _validation(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    if recipe.sources and recipe.training().train.validation.every and not recipe.curate.splits.validation:
        yield Issue(
            "curate.splits.validation is 0, so there is no validation loss; raise it, or set train.validation.every: 0",
            None,
        )


def _live_evaluation(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    model, train = recipe.training()
    evaluation = train.evaluation
    if evaluation.every and not recipe.sources:
        yield Issue("train.evaluation.every: tasks need a corpus, and the recipe has no sources; set it to 0")
    elif evaluation.every and model.attention != "causal":
        yield Issue(
            f"train.evaluation.every: tasks need a causal model and model.attention is {model.attention}; set it to 0"
        )
    elif evaluation.every:
        yield from _tasks("train.evaluation.tasks", evaluation.tasks, recipe)


def _evaluation(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    if recipe.training().train.objective not in SCORED_BY_TASKS:  # the stage scores the objective itself
        return
    yield from _tasks("evaluate.tasks", recipe.evaluate.tasks, recipe)
    if recipe.evaluate.num_continuations and not recipe.curate.splits.test:
        yield Issue(
            "evaluate.num_continuations needs held-out documents, but curate.splits.test is 0; raise it, or set "
            "num_continuations: 0"
        )


def _tasks(field: str, tasks: Sequence[str], recipe: Recipe) -> Iterator[Issue]:
    held_out = [name for name in tasks if name in HELD_OUT_TASKS]
    if held_out and not recipe.curate.splits.test:
        yield Issue(
            f"{field}: {', '.join(held_out)} need held-out documents, but curate.splits.test is 0; raise it, or remove "
            "these tasks"
        )
    if "cloze" in tasks:
        yield from _cloze(field, recipe.training().model.sequence_length, recipe.evaluate)
    if set(tasks) & set(RECALL_TASKS):
        yield from _recall(recipe.training().model.sequence_length, recipe.evaluate)
    named = [name for name in tasks if name not in (*HELD_OUT_TASKS, *RECALL_TASKS)]
    if named:
        # Loaded here: lm-eval takes seconds, and recipes that name only the held-out tasks need it later.
        from gristmill.evaluation.tasks.harness import require_tasks

        for name in named:
            try:
                require_tasks([name], Path(recipe.evaluate.data) if recipe.evaluate.data else None)
            except (RecipeError, InputError) as error:
                yield Issue(f"{field}: {error}", type(error))


def _recall(sequence_length: int, evaluate: EvaluateConfig) -> Iterator[Issue]:
    for length in evaluate.recall_lengths:
        if length > sequence_length:
            yield Issue(
                f"evaluate.recall_lengths: {length} is above model.sequence_length {sequence_length}; leave it out, or "
                "raise model.sequence_length"
            )


def _cloze(field: str, sequence_length: int, evaluate: EvaluateConfig) -> Iterator[Issue]:
    min_tokens = MIN_QUESTION_BYTES // MAX_BYTES_PER_TOKEN
    max_tokens = MAX_QUESTION_BYTES // TYPICAL_BYTES_PER_TOKEN
    if sequence_length < min_tokens:
        yield Issue(
            f"{field}: questions of cloze have at least {MIN_QUESTION_BYTES} bytes, {min_tokens} tokens or more, "
            f"but model.sequence_length is {sequence_length}; raise it, or remove cloze"
        )
    elif sequence_length < max_tokens:
        yield Issue(
            f"{field}: questions of cloze have up to {MAX_QUESTION_BYTES} bytes, about {max_tokens} tokens, but "
            f"model.sequence_length is {sequence_length}: questions that do not fit are not evaluated",
            None,
        )


def _repeats(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    """Sources read more than 4 times, estimated from file sizes; training reports the exact numbers."""
    tokens, weights = estimated_tokens(recipe), recipe.training_weights
    if recipe.train is None or not any(tokens.values()) or (None in weights.values() and not all(tokens.values())):
        return
    epochs = epochs_by_source(tokens, weights, recipe.train.tokens, recipe.index.phases)
    for line in repeat_warnings(epochs, tokens, recipe.train.tokens):
        yield Issue(
            f"{line.removeprefix('warning: ')} (estimated from the raw files at {TYPICAL_BYTES_PER_TOKEN} bytes per "
            "token, before curation; exact after the stage index)",
            None,
        )


def _mix(recipe: Recipe, world_size: int) -> Iterator[Issue]:
    """A mix of sources or scores that are not there; caps that do not allow the run, by the sizes of raw files."""
    mix, curate = recipe.index.mix, recipe.curate
    if mix is None:
        return
    scores = [PREFIX + name for name in curate.quality_scores]
    if mix.score.startswith(PREFIX) and mix.score not in [*scores, *["quality_score"] * (curate.quality is not None)]:
        yield Issue(
            f"index.mix.score: curate.quality_scores has no {mix.score.removeprefix(PREFIX)!r}; it has "
            f"{', '.join(curate.quality_scores) or 'none'}"
        )
    if (topic := mix.topic or "").startswith(LABELS_PREFIX) and topic.removeprefix(LABELS_PREFIX) not in curate.labels:
        yield Issue(
            f"index.mix.topic: curate.labels has no {topic.removeprefix(LABELS_PREFIX)!r}; it has "
            f"{', '.join(curate.labels) or 'none'}"
        )
    try:
        index.check_sources(mix, recipe)
    except RecipeError as error:
        yield Issue(str(error))
        return
    tokens = estimated_tokens(recipe)
    if all(tokens.values()) and mix.topic is None and not mix.repeats:
        try:
            index.estimated_mix(recipe, tokens)
        except RecipeError as error:
            yield Issue(f"{error} (estimated from the raw files, before curation)", None)


def estimated_tokens(recipe: Recipe) -> dict[str, int]:
    """Source to train on -> its tokens, about, by the sizes of its raw files; 0 if unknown."""
    sources = [source for source in recipe.sources if source.held_out is None]
    return {source.name: _text_bytes(source) // TYPICAL_BYTES_PER_TOKEN for source in sources}


def _text_bytes(source: SourceConfig) -> int:
    """Estimated text bytes of a source's local files; 0 if unknown."""
    if source.format in ("python_docs", "datasets", *MARKUP_FORMATS) or any(map(is_address, source.paths)):
        return 0
    try:
        located = locate(source)
    except InputError:  # reported by _sources
        return 0
    return sum(
        Path(path).stat().st_size * (COMPRESSED_RATIO if path.endswith(COMPRESSED_SUFFIXES) else 1)
        for _, path in located
    )


CHECKS: dict[str, tuple[Callable[[Recipe, int], Iterator[Issue]], ...]] = {
    "curate": (_user_functions, _sources, _listed_files, _quality_models),
    "tokenizer": (_tokenizer,),
    "index": (_repeats, _mix),
    "train": (_layout, _start, _router, _validation, _live_evaluation),
    "evaluate": (_evaluation,),
}
