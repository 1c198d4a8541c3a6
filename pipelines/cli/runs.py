"""`gristmill runs`: the models of a work folder beside each other. `gristmill watch`: a page in a browser on runs."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import rich.table
import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json, differing_fields
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.foundation.progress import Reporter, print_block
from gristmill.pipelines.cli.options import read_text
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.remote import lease

# The models that stand beside each other in a work folder: the recipe's own, those set aside, those not finished.
#
# A changed `train` section sets the finished model aside under its fingerprint (WORKDIR/train.superseded-FINGERPRINT)
# and takes it back when the recipe is again as it was; nothing trained is deleted without `--overwrite` or `gristmill
# runs remove`. A run has its fingerprint's beginning for a name, and an alias that says what differs or that the user
# gave it (WORKDIR/run_aliases.json).


NAME_CHARACTERS = 12  # of a fingerprint
MAX_DIFFERENCES = 3  # that are shown of a run
ALIASES_NAME = "run_aliases.json"
MAX_ALIAS_FIELDS = 2
CURRENT, ASIDE, UNFINISHED = "current", "set aside", "not finished"


@dataclass(frozen=True)
class TrainedRun:
    """name: the beginning of its fingerprint. alias: for readers, "" where nothing differs. state: current, set aside
    or not finished. differences: fields in which its recipe differs from the current model's. tokens, loss: of the last
    step, in nats a token; None before the first. scores: task -> its first score with a standard error. folders: of
    the model, its scores and its report."""

    name: str
    alias: str
    state: str
    differences: tuple[str, ...]
    tokens: int | None
    loss: float | None
    scores: dict[str, float]
    folders: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for folder in self.folders for path in folder.rglob("*") if path.is_file())


def trained_runs(workdir: Path) -> list[TrainedRun]:
    """The current model first, then the others by name."""
    current = _manifest(workdir / "train")
    complete = [(CURRENT, workdir / "train")] if current else []
    complete += [(ASIDE, folder) for folder in sorted(workdir.glob("train.superseded-*")) if _manifest(folder)]
    given = _given_aliases(workdir)
    runs = []
    for state, folder in complete:
        manifest = read_manifest(folder)
        differences = differing_fields(current.config, manifest.config) if current else []
        companions = _companions(workdir, manifest.fingerprint)
        tokens, loss = _last_step(folder)
        name = manifest.fingerprint[:NAME_CHARACTERS]
        runs.append(
            TrainedRun(
                name,
                given.get(name) or alias_of(differences),
                state,
                tuple(differences),
                tokens,
                loss,
                _scores(companions),
                (folder, *companions),
            )
        )
    for folder in sorted(workdir.glob(".train-*")):
        name = folder.name.removeprefix(".train-")[:NAME_CHARACTERS]
        if folder.is_dir() and name != "old":
            runs.append(TrainedRun(name, given.get(name, ""), UNFINISHED, (), *_last_step(folder), {}, (folder,)))
    return runs


def alias_of(differences: Sequence[str]) -> str:
    """["train.optimizer.learning_rate: 0.002 -> 0.001"] -> "learning_rate=0.001"; the first fields where there are
    many."""
    parts = []
    for difference in differences[:MAX_ALIAS_FIELDS]:
        path, _, values = difference.partition(": ")
        value = values.rpartition(" -> ")[2].strip('"')
        parts.append(f"{path.rpartition('.')[2]}={re.sub(r'[^A-Za-z0-9._+-]+', '-', value)}")
    return ",".join(parts) + ("" if len(differences) <= MAX_ALIAS_FIELDS else ",…")


def run_of(workdir: Path, name: str) -> TrainedRun:
    """The run with this name or alias. Raises InputError if none has it, or two have this alias."""
    runs = trained_runs(workdir)
    matching = [run for run in runs if run.name == name] or [run for run in runs if run.alias == name]
    if not matching:
        known = ", ".join(run.name for run in runs) or "none"
        raise InputError(f"{workdir}: no run {name!r}; its runs are {known}")
    if len(matching) > 1:
        names = ", ".join(run.name for run in matching)
        raise InputError(f"{workdir}: {name!r} is the alias of {names}; use one of these names")
    return matching[0]


def name_run(workdir: Path, name: str, alias: str) -> None:
    """Gives a run an alias. Raises InputError for a name that no run has, an alias that another run has, or one with
    characters that a command line would read otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=,-]{0,63}", alias):
        raise InputError(
            f"alias {alias!r}: write up to 64 letters, digits and . _ + = , - that begin with a letter or digit"
        )
    with lease(workdir):
        run = run_of(workdir, name)
        owner = next((other for other in trained_runs(workdir) if alias in (other.alias, other.name)), run)
        if owner.name != run.name:
            raise InputError(f"{workdir}: {alias!r} already names {owner.name}; give it another alias")
        aliases = _given_aliases(workdir) | {run.name: alias}
        write_atomic(workdir / ALIASES_NAME, canonical_json(aliases) + b"\n")


def _given_aliases(workdir: Path) -> dict[str, str]:
    path = workdir / ALIASES_NAME
    if not path.is_file():
        return {}
    try:
        aliases = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); remove it, and give the aliases again") from error
    if not isinstance(aliases, dict):
        raise InputError(f"{path}: not a mapping of runs to aliases; remove it, and give the aliases again")
    return {str(name): str(alias) for name, alias in aliases.items()}


def remove_runs(workdir: Path, names: Sequence[str]) -> list[TrainedRun]:
    """Removes models set aside or not finished, with their scores; returns them.

    Raises InputError for a name that no run has, for the current model, and while another process works here."""
    with lease(workdir):
        removed = [run_of(workdir, name) for name in names]
        for run in removed:
            if run.state == CURRENT:
                raise InputError(
                    f"{workdir}: {run.name} is the current model; run another recipe here first, which sets it aside, "
                    "or remove the folder yourself"
                )
        for run in removed:
            for folder in run.folders:
                remove_tree(folder)
        return removed


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None


def _companions(workdir: Path, fingerprint: str) -> tuple[Path, ...]:
    """The folders of the stages evaluate and report that were made from the model with this fingerprint."""
    folders = [*workdir.glob("evaluate"), *workdir.glob("evaluate.superseded-*")]
    folders += [*workdir.glob("report"), *workdir.glob("report.superseded-*")]
    return tuple(
        folder
        for folder in sorted(folders)
        if (manifest := _manifest(folder)) is not None and manifest.inputs.get("train") == fingerprint
    )


def _last_step(folder: Path) -> tuple[int | None, float | None]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None, None
    tokens = loss = None
    for line in _steps(path):
        tokens, loss = line.get("tokens", tokens), line.get("loss", loss)
    return tokens, loss


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").splitlines():
        try:
            step = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(step, dict):
            yield step


def _scores(folders: Sequence[Path]) -> dict[str, float]:
    path = next((folder / "results.json" for folder in folders if (folder / "results.json").is_file()), None)
    if path is None:
        return {}
    scores: dict[str, float] = {}
    for task, metrics in json.loads(path.read_bytes())["results"].items():
        for metric, value in metrics.items():
            if "," in metric and "stderr" not in metric and isinstance(value, int | float):
                scores.setdefault(task, float(value))
    return scores


runs_app = typer.Typer(help="List the models of a work folder, or remove some of them.")

WorkFolder = Annotated[Path | None, typer.Option("--workdir", metavar="DIR", help="Default: every folder in work/.")]


@runs_app.callback(invoke_without_command=True)
def list_runs(context: typer.Context, workdir: WorkFolder = None) -> None:
    """List the models of a work folder: what differs, tokens, loss, scores, size on disk."""
    if context.invoked_subcommand is not None:
        return
    folders = [workdir] if workdir is not None else sorted(path for path in Path("work").glob("*") if path.is_dir())
    rows = [(folder, run) for folder in folders for run in trained_runs(folder)]
    if not rows:
        where = workdir if workdir is not None else "work/*"
        raise InputError(f"{where}: no trained models; train one with `gristmill run RECIPE`, or give --workdir DIR")
    table = rich_table()
    for folder, run in rows:
        table.add_row(str(folder), *cells(run))
    print_block(table)


@runs_app.command("remove")
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Names or aliases as `gristmill runs` shows them.")
    ],
    workdir: Annotated[Path, typer.Option("--workdir", metavar="DIR", help="The work folder.")],
) -> None:
    """Remove models that were set aside or not finished, with their scores."""
    for run in remove_runs(workdir, names):
        print(f"removed {run.name}: {', '.join(str(folder) for folder in run.folders)}")


@runs_app.command("name")
def name(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or alias as `gristmill runs` shows it.")],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="What to call it.")],
    workdir: Annotated[Path, typer.Option("--workdir", metavar="DIR", help="The work folder.")],
) -> None:
    """Give a model an alias, which every `gristmill runs` command takes."""
    name_run(workdir, run, alias)
    print(f"{run} is {alias}")


def rich_table() -> rich.table.Table:
    return rich.table.Table("folder", "run", "alias", "state", "differs in", "tokens", "loss", "scores", "size")


def cells(run: TrainedRun) -> tuple[str, ...]:
    differences = [*run.differences[:MAX_DIFFERENCES]]
    if len(run.differences) > MAX_DIFFERENCES:
        differences.append(f"and {len(run.differences) - MAX_DIFFERENCES} more")
    return (
        run.name,
        run.alias,
        run.state,
        "\n".join(differences),
        "" if run.tokens is None else f"{run.tokens:,}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "\n".join(f"{task} {value:.4g}" for task, value in run.scores.items()),
        f"{run.num_bytes / 1e6:,.1f} MB",
    )


def watch(
    workdir: Annotated[list[Path], typer.Argument(metavar="WORKDIR...", help="Work folders; several are compared.")],
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The recipe of the run, for the time that is left.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8002,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the token of requests.")] = None,
) -> None:
    """Serve a page on runs while they go on: curves, rate, time left, memory, samples of text. Until Ctrl-C."""
    try:
        from gristmill.pipelines.explorer.explorer_server import Address, serve_pages  # the extra `serve`
        from gristmill.pipelines.explorer.watch import make_watch_app, watched_runs
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed; run `pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    tokens = None if recipe is None else load_recipe(str(recipe)).training()[1].tokens
    address = Address(host, port, None if token_file is None else read_text(token_file).strip())
    app = make_watch_app(watched_runs(workdir, tokens), address.token)
    serve_pages(app, address, f"watching {', '.join(map(str, workdir))}", Reporter.to_terminal())
