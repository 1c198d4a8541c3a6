"""Checkpoints: torch.distributed.checkpoint folders with parameter names that do not depend on the layout. A checkpoint
is complete or absent, and equal runs give equal bytes.

ROOT/step-00000250/ holds one .distcp file a rank, .metadata, model.json, a copy of the metrics up to that step and,
written last, manifest.json with every file's digest and its own. A manifest proves that the files belong together, not
that they are harmless: .metadata is a pickle, of which restricted_pickle.py makes tensors' descriptions alone. A hidden
folder (.step-...) is incomplete and ignored."""

import io
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache, sync, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.manifest import (
    Manifest,
    StageIdentity,
    changed,
    differences,
    missing_and_extra,
    read_manifest,
    write_manifest,
)
from gristmill.foundation.progress import Reporter
from gristmill.training.checkpoint.restricted_pickle import DAMAGED, TensorReader
from gristmill.training.config.model import OMIT_DEFAULT, ModelConfig
from gristmill.training.model.init import cast, fill
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import Mesh, broadcast_from_first

MODEL_NAME = "model.json"
TRANSFORMERS = "transformers"  # the folder that transformers opens, which a run on a model of transformers writes
SINGLE_PROCESS_WARNING = "torch.distributed is disabled"
CODE_VERSION = 3  # of the format: names and meaning of tensors and fields
SELDOM_SET = (
    "moe",
    "attention",
    "segments",
    "final_norm",
    "gelu",
    "head_transform",
    "head_bias",
    "outputs",
    *(name for name, field in ModelConfig.model_fields.items() if field.json_schema_extra == OMIT_DEFAULT),
)
STEP_NAME = re.compile(r"step-(\d{8,})")


class SavedModelConfig(dict[str, Any]):
    """Content of model.json: {"model": ModelConfig, "vocab_size", "end_of_document"}; fields that models seldom have
    are left out at their default. folder_digest stands for the folder of a model of transformers."""

    @classmethod
    def of(
        cls, model: ModelConfig, vocab_size: int, end_of_document: int, folder_digest: str = ""
    ) -> "SavedModelConfig":
        if model.transformers is not None:
            sizes = {"transformers": folder_digest, "sequence_length": model.sequence_length}
            return cls(model=sizes, vocab_size=vocab_size, end_of_document=end_of_document)
        config = model.model_dump(mode="json")
        for name in SELDOM_SET:
            if getattr(model, name) == ModelConfig.model_fields[name].get_default(call_default_factory=True):
                del config[name]
        return cls(model=config, vocab_size=vocab_size, end_of_document=end_of_document)


class DiskFiles(FileSystem):
    """Raises the OSError of a full disk itself: torch.save, which closes its archive then, raises a RuntimeError about
    an unexpected position, and the error that another rank is told has lost its cause."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error


class _Writer(FileSystemWriter):
    """Leaves the random identifier and the path out of torch's .metadata, so that equal states give equal bytes."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = DiskFiles()

    def storage_meta(self) -> None:
        return None


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps that have a checkpoint, in ascending order. Folders with other names are ignored."""
    matches = [STEP_NAME.fullmatch(path.name) for path in root.glob("step-*") if path.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint. metadata: the run's state, as JSON. files: contents of other files by name, such as the
    metrics so far; those of rank 0 are written."""

    tensors: Mapping[str, Tensor]
    saved_config: SavedModelConfig
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def save(root: Path, step: int, content: CheckpointContent, mesh: Mesh, digests: DigestCache | None = None) -> None:
    """Writes the complete checkpoint of a step; called by all processes."""
    folder = fresh_folder(root, step, mesh)
    with without_warning(), errors_of_ranks():
        dcp.save(dict(content.tensors), storage_writer=_Writer(folder), no_dist=not mesh.distributed)
    commit(root, step, content, mesh, mesh.world.group, digests or DigestCache())


def start_saving(
    root: Path, step: int, tensors: Mapping[str, Tensor], mesh: Mesh, group: dist.ProcessGroup | None
) -> Future[Any]:
    """Copies the tensors and writes them in the background; `commit` must follow once the future is done."""
    folder = fresh_folder(root, step, mesh)
    with without_warning():
        saved: Any = dcp.async_save(
            dict(tensors), storage_writer=_Writer(folder), process_group=group, no_dist=not mesh.distributed
        )
    assert isinstance(saved, Future)  # an AsyncSaveResponse only where a stager is given
    return saved


def commit(
    root: Path,
    step: int,
    content: CheckpointContent,
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    digests: DigestCache,
) -> None:
    """Writes digests and manifest, then renames the folder: from the rename on the checkpoint is complete. Each rank
    hashes the files that it wrote; what digests knows is not computed again."""
    temporary, final = _temporary_folder(root, step), step_folder(root, step)
    own = {path.name: digests(path) for path in sorted(temporary.glob(f"__{mesh.world.rank}_*"))}
    for name, digest in _gather_on_first(own, mesh, group).items():
        digests.add(temporary / name, digest)
    if mesh.is_first:
        write_model_config(temporary, content.saved_config)
        for name, file_bytes in content.files.items():
            write_atomic(temporary / name, file_bytes)
        identity = StageIdentity("checkpoint", CODE_VERSION, {"step": step})
        write_manifest(temporary, identity, content.metadata, {}, ("torch",), digests)
        sync(temporary)
        if final.exists():
            _remove(final)
        os.replace(temporary, final)
        sync(root)
    _wait_for_all(group)


def load(folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Fills the tensors in place from a checkpoint of any layout. The folder must be `verified` before.

    Raises InputError for a checkpoint that does not hold them; runs no code of it."""
    errors = errors_of_ranks(DAMAGED, f"{folder}: this checkpoint cannot be loaded; take another one")
    reader = TensorReader(folder)
    try:
        with without_warning(), errors, _quiet_loader():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not mesh.distributed)
    except InputError as error:
        raise (reader.problem or error) from error


def verified(folder: Path, digests: DigestCache | None = None) -> dict[str, Any]:
    """Verifies all files of a checkpoint against its manifest and returns its metadata. Raises InputError naming the
    differences."""
    manifest = _checkpoint_manifest(folder)
    _refuse(folder, differences(folder, manifest, digests or DigestCache()))
    return manifest.metadata


def newest_complete(
    root: Path, saved_config: SavedModelConfig, reporter: Reporter, mesh: Mesh, digests: DigestCache
) -> tuple[Path, dict[str, Any]] | None:
    """The last complete checkpoint of this model, and its metadata; called by all processes, which share the hashing.
    Damaged ones are reported and skipped; incomplete folders of a killed process are removed."""
    if mesh.is_first:
        remove_incomplete(root)
    for step in broadcast_from_first(mesh, steps_in(root)[::-1]):
        folder = step_folder(root, step)
        try:
            return folder, _resumable(folder, step, saved_config, mesh, digests)
        except InputError as error:
            if mesh.is_first:
                reporter.info(f"checkpoint skipped: {error}")
    return None


def remove_incomplete(root: Path) -> None:
    """Removes what a process that was killed has left of checkpoints."""
    for incomplete in root.glob(".step-*"):
        shutil.rmtree(incomplete) if incomplete.is_dir() else incomplete.unlink()


def _resumable(
    folder: Path, step: int, saved_config: SavedModelConfig, mesh: Mesh, digests: DigestCache
) -> dict[str, Any]:
    """The metadata a run resumes from. Raises InputError on all processes if it is damaged or belongs to another step
    or run."""
    outcome: tuple[str | None, Manifest | None] = (None, None)
    if mesh.is_first:
        try:
            outcome = None, _manifest_of_run(folder, step, saved_config)
        except InputError as error:
            outcome = str(error), None
    problem, manifest = broadcast_from_first(mesh, outcome)
    if manifest is None:
        raise InputError(problem or "")
    _refuse(folder, _differences_jointly(folder, manifest, mesh, digests))
    return manifest.metadata


def _differences_jointly(folder: Path, manifest: Manifest, mesh: Mesh, digests: DigestCache) -> list[str]:
    """Each process hashes its share of the files, by size in turn."""
    by_size = sorted(manifest.outputs, key=lambda output: (-output.bytes, output.path))
    own = changed(folder, by_size[mesh.world.rank :: mesh.world.size], digests)
    differences = [own]
    if mesh.distributed:
        differences = [[] for _ in range(mesh.world.size)]
        dist.all_gather_object(differences, own)
    wrong = broadcast_from_first(mesh, missing_and_extra(folder, manifest) if mesh.is_first else [])
    return wrong + sorted(line for lines in differences for line in lines)


def _manifest_of_run(folder: Path, step: int, saved_config: SavedModelConfig) -> Manifest:
    """The manifest, whose files may be damaged. Raises InputError if it belongs to another step or run."""
    manifest = _checkpoint_manifest(folder)
    if manifest.config != {"step": step}:
        raise InputError(
            f"{folder}: holds the checkpoint of step {manifest.config.get('step')}; give it that name or remove it"
        )
    if read_model_config(folder) != saved_config or not {"trainer", "data"} <= manifest.metadata.keys():
        raise InputError(f"{folder}: a checkpoint of another run or model ({MODEL_NAME} differs); move it away")
    return manifest


def prune(root: Path, keep: set[int]) -> None:
    """Removes all other checkpoints. A kill leaves complete checkpoints and hidden incomplete folders only."""
    for step in steps_in(root):
        if step not in keep:
            _remove(step_folder(root, step))


def _remove(folder: Path) -> None:
    """Renames the folder before it removes files, so that a checkpoint under its name is always complete."""
    hidden = folder.with_name(f".{folder.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    os.replace(folder, hidden)
    sync(folder.parent)
    shutil.rmtree(hidden)


def load_model(
    checkpoint: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Transformer, ModelConfig]:
    """Loads the full model into this process from a checkpoint of any layout, with weights in dtype and no gradients.

    checkpoint is a step's folder. Raises InputError if it is no checkpoint or a damaged one."""
    verified(checkpoint)
    saved_config = read_model_config(checkpoint)
    check_own_model(checkpoint, saved_config)
    config = ModelConfig.model_validate(saved_config["model"])
    model = Transformer(config, saved_config["vocab_size"], options=ComputeOptions(dtype))
    fill(model, lambda _, parameter: torch.empty(parameter.shape))
    load(checkpoint, saved_tensors(dict(model.named_parameters()), saved_buffers(model)), model.tensor.mesh)
    return cast(model, device, dtype).eval().requires_grad_(False), config


def check_own_model(checkpoint: Path, saved_config: SavedModelConfig) -> None:
    """Raises InputError for a checkpoint of a model of transformers, which only its own run reads."""
    if saved_config["model"].get("transformers") is not None:
        raise InputError(
            f"{checkpoint}: the state of a run on a model of transformers, which that run alone reads; name the folder "
            "`transformers` of the run, which it writes at its end"
        )


def write_model_config(folder: Path, saved_config: SavedModelConfig) -> None:
    write_atomic(folder / MODEL_NAME, canonical_json(dict(saved_config)) + b"\n")


def read_model_config(checkpoint: Path) -> SavedModelConfig:
    """Reads model.json. Raises InputError if it is missing or not a valid SavedModelConfig."""
    path = checkpoint / MODEL_NAME
    if not path.is_file():
        raise InputError(
            f"{path}: missing, so {checkpoint} is not a checkpoint; name a folder like checkpoints/step-00000100"
        )
    try:
        saved_config = SavedModelConfig(json.loads(path.read_bytes()))
        ModelConfig.model_validate(saved_config["model"])
        int(saved_config["vocab_size"]), int(saved_config["end_of_document"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: does not describe a model ({error}); take another checkpoint") from error
    return saved_config


def saved_tensors(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by flat name, sharing memory with the run."""
    tensors = {f"model.{name}": value.detach() for name, value in (*parameters.items(), *buffers.items())}
    return tensors | {f"optimizer.{name}": value for name, value in (optimizer_state or {}).items()}


def _checkpoint_manifest(folder: Path) -> Manifest:
    """Raises InputError if the manifest has changed or is of another version."""
    manifest = read_manifest(folder)
    if manifest.code_version != CODE_VERSION:
        raise InputError(f"{folder}: a checkpoint of version {manifest.code_version}, this code reads {CODE_VERSION}")
    return manifest


def _refuse(folder: Path, wrong: list[str]) -> None:
    if wrong:
        raise InputError(
            f"{folder}: this checkpoint is damaged: {'; '.join(wrong)}; remove it to use the one before it"
        )


@contextmanager
def without_warning() -> Iterator[None]:
    """Silences torch's warning that a single process saves or loads, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SINGLE_PROCESS_WARNING)
        yield


def _temporary_folder(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.tmp"


def fresh_folder(root: Path, step: int, mesh: Mesh) -> Path:
    folder = _temporary_folder(root, step)
    if mesh.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    _wait_for_all(mesh.world.group)
    return folder


def _gather_on_first(own: dict[str, str], mesh: Mesh, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Digests of all processes, on the first one."""
    if group is None:
        return own
    digests: list[dict[str, str]] | None = [{} for _ in range(mesh.world.size)] if mesh.is_first else None
    dist.gather_object(own, digests, group=group, group_dst=0)
    return {name: digest for rank_digests in digests or [] for name, digest in rank_digests.items()}


def _wait_for_all(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group=group)


@contextmanager
def _quiet_loader() -> Iterator[None]:
    """Drops what torch logs of unreadable metadata, with its traceback, before it reads again and raises the error."""

    def is_other(record: logging.LogRecord) -> bool:
        return "metadata is not found" not in str(record.msg)

    logging.getLogger().addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(is_other)


@contextmanager
def errors_of_ranks(of_file: tuple[type[Exception], ...] = (), message: str = "") -> Iterator[None]:
    """Raises the OSError (full or read-only disk), InputError or Ctrl-C of a rank instead of torch's exception around
    it. of_file: errors that a damaged file causes, raised as InputError with this message and their own first line."""
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError | InputError | KeyboardInterrupt):
                raise failure from error
        for failure, _ in error.failures.values():
            if isinstance(failure, (*of_file, AssertionError)) and message:
                first_line = (str(failure).splitlines() or [type(failure).__name__])[0]
                raise InputError(f"{message} ({first_line})") from error
        raise
