"""Typer commands with grouped options: a parameter that is a dataclass becomes one option for each of its fields."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_address
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.store.store import download_stubs
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine, may_fork
from gristmill.foundation.startup import DeferredModule, freeze_loaded_modules, rank_and_world_size
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.preflight import check_folder, check_workdir, require_ready
from gristmill.pipelines.stages.runner import RunContext, Runner
from gristmill.pipelines.stages.stage import Stage
from gristmill.pipelines.stages.stage_list import runnable_stages, stages_of, stages_up_to
from gristmill.pipelines.workdir.publication import RemoteLease
from gristmill.pipelines.workdir.raw_files import LockUpdate, local_bytes, lock_raw_files
from gristmill.pipelines.workdir.remote import RemoteWork, Uploader, lease, local_mirror


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters expanded; it still gets them as values. Fields need defaults.

    Annotations and defaults of the fields are those of the options, as in a plain Typer command."""
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        annotation = get_type_hints(command, include_extras=True)[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
            options += _options(annotation)
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=annotation))

    @wraps(command)
    def expanded(**values: Any) -> None:
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **grouped)

    expanded.__signature__ = Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _options(group: Any) -> list[Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name])
        for field in fields(group)
    ]


def output_file(path: Path | None) -> Path | None:
    """A callback of options that name a file to write, so that a wrong one is found before the work. Raises RecipeError
    or InputError."""
    if path is not None:
        if path.is_dir():
            raise RecipeError(f"--output {path}: a folder; name a file in it")
        check_folder(path.parent, f"--output {path}")
    return path


# The options that choose where the work of a command runs; they do not affect its output.

slurm_engine = DeferredModule("gristmill.foundation.runtime.tasks.slurm")  # for --engine slurm alone
ray_engine = DeferredModule("gristmill.foundation.runtime.tasks.ray")  # for --engine ray alone

WorkersOption = Annotated[
    int,
    typer.Option(
        min=1, max=1024, help="Worker processes (slurm: array elements) at once; they do not affect the output."
    ),
]
EngineOption = Annotated[
    Literal["local", "ray", "slurm"],
    typer.Option(
        help="Where curation and indexing run: on this machine, on a Ray cluster or as Slurm array jobs; the bytes are "
        "the same."
    ),
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The Ray cluster (default: auto, the one of this machine).")
]


@dataclass(frozen=True)
class EngineOptions:
    """Options of a command that runs tasks."""

    workers: WorkersOption = 2
    engine: EngineOption = "local"
    address: AddressOption = None

    def open(self, reporter: Reporter, work_folder: Path | None = None) -> Engine:
        """The engine. Raises RecipeError or InputError if a cluster cannot be used; see RayEngine."""
        folder = work_folder or Path("work")
        remote = RemoteWork.of_mirror(folder)
        if remote is not None:
            remote.check_stubs(reporter.info)
            if self.engine == "local":
                download_stubs(remote.store, folder)
        store = "" if remote is None else remote.store.address
        if self.engine == "ray":
            return ray_engine.RayEngine(self.address or "auto", reporter, folder, store=store)
        if self.engine == "slurm" and self.address is None:
            return slurm_engine.SlurmEngine(self.workers, reporter, folder, store=store)
        if self.address is not None:
            raise RecipeError(f"--address {self.address} belongs to --engine ray; add that, or leave the address out")
        return LocalEngine(self.workers, reporter)


# Options shared by the commands that run stages, and the functions that build a Runner from them.

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a bundled recipe.")
]


def parse_workdir(text: str) -> Path:
    if not text.strip():
        raise RecipeError("--workdir is empty; name a folder, or leave it out for work/NAME")
    if "\0" in text:
        raise RecipeError("--workdir contains a NUL character, which no path can; remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(
            f"--workdir {text.encode(errors='surrogateescape')!r}: the name is no UTF-8, which libraries that write "
            "the files need; name another folder"
        ) from None
    if is_address(text):
        return local_mirror(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise RecipeError(f"--workdir {text}: {Path(text).parts[0]}: no such user; write the whole path") from None


WorkdirOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", parser=parse_workdir, help="Work folder for all stages, or s3://BUCKET/RUN (default: work/NAME)."
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a field: train.layout.tensor=2")]
MIN_PARALLEL_BYTES = 4_000_000  # of raw files; less is curated in about the time in which workers start without fork
UpdateLockOption = Annotated[bool, typer.Option("--update-lock", help="Accept raw files that changed.")]


@dataclass(frozen=True)
class StageOptions(EngineOptions):
    """Options of a command that runs a stage of a recipe."""

    workdir: WorkdirOption = None
    set_: SetOption = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what another recipe made here, instead of setting it aside.")
    ] = False
    log_json: Annotated[bool, typer.Option("--log-json", help="Write each message as a line of JSON.")] = False

    def reporter(self) -> Reporter:
        return Reporter.to_json() if self.log_json else Reporter.to_terminal()


def workdir_of(recipe: Recipe, workdir: Path | None) -> Path:
    return workdir or Path("work") / recipe.name


def make_runner(
    recipe: Recipe,
    stages: Sequence[Stage],
    options: StageOptions,
    update_lock: LockUpdate = False,
    only: str | None = None,
    several_recipes: bool = False,
) -> Runner:
    """A Runner for the stages, of which `only` one may run. several_recipes: the folder is for outputs of more recipes.

    Raises RecipeError or InputError for everything that can be checked before work starts."""
    folder = workdir_of(recipe, options.workdir)
    rank, world_size = rank_and_world_size()
    reporter = options.reporter() if rank == 0 else Reporter.silent()
    if rank == 0:
        chosen = [candidate for candidate in stages if only in (None, candidate.name)]
        check_workdir(folder, chosen)
        require_ready(recipe, chosen, folder, world_size, reporter)
    freeze_loaded_modules()
    publisher = _uploader(folder, reporter, options.engine != "local") if rank == 0 else None
    try:
        engine = options.open(reporter, folder) if rank == 0 else LocalEngine(1, reporter)
        if rank == 0:
            _start_workers(engine, recipe, folder, chosen)
        with lease(folder) if rank == 0 else nullcontext():
            lock = lock_raw_files(recipe, folder, engine, update=update_lock, write=rank == 0)
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    processes = RunContext(engine, rank, publisher, options.overwrite, several_recipes)
    return Runner(recipe, folder, stages, lock, reporter, processes)


def _uploader(folder: Path, reporter: Reporter, on_nodes: bool) -> Uploader | None:
    """Uploader of a mirror's stages with the store's lease; the mirror is filled first. None for other folders.
    on_nodes: what nodes wrote is left in the store.

    Raises InputError if the store cannot be written to or another process writes there."""
    remote = RemoteWork.of_mirror(folder)
    if remote is None:
        return None
    remote.store.check_writable()
    publisher = Uploader(remote, RemoteLease(remote.store, reporter.info), reporter.info)
    try:
        remote.fetch(in_blocks=True, keep_stubs=on_nodes)
    except BaseException:
        publisher.close()
        raise
    return publisher


def _start_workers(engine: Engine, recipe: Recipe, folder: Path, stages: Sequence[Stage]) -> None:
    """Start the workers of the first stage that is not complete while its raw files are looked up, unless they would
    take longer to start than to curate these files."""
    waiting = [stage for stage in stages if not (folder / stage.name / MANIFEST_NAME).is_file()]
    if waiting and waiting[0].worker_modules and (may_fork() or local_bytes(recipe) >= MIN_PARALLEL_BYTES):
        engine.start(waiting[0].worker_modules)


def run_stage(
    name: str,
    reference: str,
    options: StageOptions,
    update_lock: LockUpdate = False,
) -> None:
    """Runs one stage of a recipe; its inputs must be complete."""
    recipe = load_recipe(reference, options.set_ or [])
    stages = stages_up_to(recipe, stages_of(recipe), name)
    make_runner(recipe, stages, options, update_lock, name).run(only=name)


def selected_stages(recipe: Recipe, to: str | None) -> tuple[Sequence[Stage], str]:
    """(the stages up to --to, else all that the recipe has sections for; why the others are skipped, or "")."""
    stages = stages_of(recipe)
    return runnable_stages(recipe, stages) if to is None else (stages_up_to(recipe, stages, to), "")


def read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); name a file, or - for standard input"
        ) from error
