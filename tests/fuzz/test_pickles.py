"""No file that gristmill reads can run code: hostile pickles are refused, and nothing is unpickled without a list."""

import ast
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import StageIdentity, read_manifest, write_manifest
from gristmill.foundation.runtime.tasks.slurm import TaskFolder
from gristmill.foundation.runtime.tasks.transport import PickledValue, packed, unpacked
from gristmill.training.checkpoint import checkpoint
from gristmill.training.checkpoint.checkpoint import load_model, step_folder
from gristmill.training.checkpoint.restricted_pickle import load_restricted
from tests.support.training_runs import BATCH, MODEL, new_run

ROOT = Path(__file__).parents[2]
FOLDERS = ("foundation", "data_pipeline", "tokenizers", "training", "evaluation", "pipelines")
# Where a class may be looked up by name, each with the reason.
READERS = {
    "training/checkpoint/restricted_pickle.py": "the list of torch's classes",
    "foundation/runtime/tasks/transport.py": "what tasks are made of, in folders only the user writes to",
    "foundation/runtime/kernels/cached_njit.py": "the user's own folder of compiled kernels",
    "foundation/runtime/kernels/compiled_kernel.py": "likewise",
    "foundation/runtime/kernels/kernel_files.py": "constants inside a compiled kernel of that folder",
    "tests/support/forked_pool.py": "a pipe between a process and its own fork",
}


class Call:
    """Pickles as a call of `function` with these arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(mark: Path) -> dict[str, Any]:
    return {
        "a call of the shell": Call(os.system, f"touch {mark}"),
        "exec": Call(exec, f"open({str(mark)!r}, 'w').close()"),
        "getattr": Call(getattr, Path, "touch"),
        "a nested list": [[{"model": Call(os.mkdir, str(mark))}]],
        "a class that opens files": Call(open, str(mark), "w"),
        "numpy's loader": Call(np.load, str(mark), None, True),
        "torch.load": Call(torch.load, str(mark)),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one step."""
    root = tmp_path_factory.mktemp("run")
    settings = {"tokens": BATCH * MODEL.sequence_length, "monitoring": {"trackers": []}}
    new_run(root, **settings).train()
    return step_folder(root / "checkpoints", 1)


def with_metadata(source: Path, root: Path, content: bytes) -> Path:
    """A copy of the checkpoint with another .metadata, and a manifest that is right again: anybody can write one."""
    folder = root / source.name
    shutil.copytree(source, folder)
    stated = read_manifest(folder)
    (folder / ".metadata").write_bytes(content)
    (folder / "manifest.json").unlink()
    write_manifest(
        folder, StageIdentity("checkpoint", checkpoint.CODE_VERSION, stated.config), stated.metadata, {}, ("torch",)
    )
    return folder


@pytest.mark.parametrize("kind", hostile(Path()))
def test_a_checkpoint_runs_no_code(trained: Path, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    folder = with_metadata(trained, tmp_path, pickle.dumps(hostile(mark)[kind]))
    with pytest.raises(InputError, match=r"\.metadata: cannot be read \(the class .* is not allowed\)"):
        load_model(folder)
    assert not mark.exists()


def test_an_entry_that_is_no_tensor_is_not_unpickled(trained: Path, tmp_path: Path) -> None:
    """torch loads such an entry with weights_only=False."""
    metadata = pickle.loads((trained / ".metadata").read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    folder = with_metadata(trained, tmp_path, pickle.dumps(metadata))
    with pytest.raises(InputError, match="is no tensor, and nothing else is read"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../step-00000002/__0_0.distcp", "/etc/passwd", ".."])
def test_a_checkpoint_names_no_file_outside_its_folder(trained: Path, tmp_path: Path, name: str) -> None:
    metadata = pickle.loads((trained / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    folder = with_metadata(trained, tmp_path, pickle.dumps(metadata))
    with pytest.raises(InputError, match="which is no file of its folder"):
        load_model(folder)


def test_metadata_of_other_tensors_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((trained / ".metadata").read_bytes())
    metadata.state_dict_metadata.clear()
    folder = with_metadata(trained, tmp_path, pickle.dumps(metadata))
    with pytest.raises(InputError, match=f"{folder}: this checkpoint cannot be loaded"):
        load_model(folder)


@pytest.mark.parametrize("kind", hostile(Path()))
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pt_file_runs_no_code(tmp_path: Path, kind: str, zipped: bool) -> None:
    mark, path = tmp_path / "mark", tmp_path / "model.pt"
    torch.save({"model": hostile(mark)[kind]}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"model\.pt: cannot be read"):
        load_restricted(path)
    assert not mark.exists()


@pytest.mark.parametrize("kind", hostile(Path()))
def test_a_task_runs_nothing_that_it_names_itself(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps(hostile(mark)[kind])
    with pytest.raises(pickle.UnpicklingError, match="which no task has"):
        unpacked(PickledValue((len(content),), content))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pickle", "_message_class", "os.system", "Path"])
def test_a_task_names_only_what_a_module_of_ours_defines(name: str) -> None:
    """Not what it imports: gristmill.foundation.files knows `shutil`, whose functions remove folders."""
    module = "gristmill.foundation.runtime.tasks.transport" if name != "Path" else "gristmill.foundation.files"
    content = f"c{module}\n{name}\n.".encode()
    if name == "_message_class":
        assert callable(unpacked(PickledValue((len(content),), content)))
    else:
        with pytest.raises(pickle.UnpicklingError, match="which no task has"):
            unpacked(PickledValue((len(content),), content))


def test_tasks_in_a_folder_that_others_may_write_to_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    (folder / "answers").mkdir(parents=True)
    tasks = TaskFolder.at(str(folder))
    tasks.files.put("answers/0000000.task", packed((True, 4), folder).to_bytes())
    assert unpacked(tasks.answer(0)) == (True, 4)
    (folder / "answers").chmod(0o777)
    with pytest.raises(InputError, match="another user can write here"):
        tasks.answer(0)


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def unlimited(name: str, call: ast.Call) -> bool:
    """Whether a call may unpickle anything."""
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "torch.load":
        return arguments.get("weights_only") != "True"
    if name.rpartition(".")[2] == "load" and name.startswith(("np.", "numpy.")):
        return arguments.get("allow_pickle", "False") != "False"
    return name.partition(".")[0] in {"joblib", "dill", "cloudpickle", "marshal", "shelve"} or name in {
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "pd.read_pickle", "runpy.run_path"),
    }


def test_nothing_unpickles_without_a_list() -> None:
    places = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name, call in calls(ast.parse(path.read_text("utf-8")))
        if unlimited(name, call)
    }
    assert places <= set(READERS), sorted(places - set(READERS))


def test_the_check_sees_each_kind_of_loader() -> None:
    """The negative control of the test above."""
    for line in (
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "pickle.loads(b)",
    ):
        (name, call), *_ = calls(ast.parse(line))
        assert unlimited(name, call), line
    for line in ("torch.load(p, weights_only=True)", "np.load(p)", "json.loads(b)"):
        (name, call), *_ = calls(ast.parse(line))
        assert not unlimited(name, call), line


def test_every_loader_asks_for_listed_classes_only(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own unpickler, which a library might call, is not used by the loaders of checkpoints."""

    class Refusing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name} was unpickled")

    def refuse(content: Any, **_: Any) -> Any:
        return Refusing(content if hasattr(content, "read") else io.BytesIO(content)).load()

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    model, _ = load_model(trained)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
