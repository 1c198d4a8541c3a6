"""Damaged checkpoints: reported, skipped, and the run resumes from the last complete one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Shard

from gristmill.foundation import files as known_digests
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache
from gristmill.foundation.progress import Reporter
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    load,
    load_model,
    newest_complete,
    prune,
    read_model_config,
    save,
    step_folder,
    steps_in,
    verified,
)
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model import init
from gristmill.training.parallel.mesh import build_mesh, single_process
from tests.support.forked_pool import ForkedPool
from tests.support.training_runs import BATCH, MODEL, digests, new_run

SIX_STEPS = {"tokens": 6 * BATCH * MODEL.sequence_length, "monitoring": {"trackers": []}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    new_run(folder, checkpoint={"every": 2, "keep_last": 3}, **SIX_STEPS).train()
    return folder


@pytest.fixture
def run_folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def damage(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_later_checkpoint_never_takes_the_place_of_a_whole_one(run_folder: Path) -> None:
    root = run_folder / "checkpoints"
    for step in (4, 6):
        damage(step_folder(root, step))
    run = new_run(run_folder, checkpoint={"every": 2, "keep_last": 1}, **SIX_STEPS)
    run._resume()
    assert run.trainer.progress.step == 2
    run.saver.prune(2, finished=False)
    verified(step_folder(root, 2))  # the only whole one stays, though only one is kept
    assert steps_in(root) == [2, 4, 6]
    run.train()
    assert steps_in(root) == [6]
    verified(step_folder(root, 6))


def test_what_an_interrupted_prune_left_goes_at_the_start(whole: Path, run_folder: Path, tmp_path: Path) -> None:
    root = run_folder / "checkpoints"
    shutil.copytree(step_folder(root, 2), step_folder(root, 1))  # not regular: a finished run keeps none such
    (root / ".step-00000003.old").mkdir()
    (root / ".step-00000003.old" / "__0_0.distcp").write_bytes(b"half removed")
    (root / ".step-00000005.tmp").write_bytes(b"no folder")
    new_run(run_folder, checkpoint={"every": 2, "keep_last": 3}, **SIX_STEPS).train()
    assert digests(run_folder) == digests(whole)


def test_weights_are_drawn_only_where_no_checkpoint_fills_them(
    whole: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, original = [], init.draw

    def counted(name: str, shape: torch.Size, seed: int, config: ModelConfig, rows: range) -> torch.Tensor:
        if config == MODEL:  # not the small model on which the objective is checked
            drawn.append(name)
        return original(name, shape, seed, config, rows)

    monkeypatch.setattr(init, "draw", counted)
    again = {"checkpoint": {"every": 2, "keep_last": 3}} | SIX_STEPS
    shutil.rmtree(step_folder(run_folder / "checkpoints", 6))
    new_run(run_folder, **again).train()
    assert drawn == []
    assert digests(run_folder) == digests(whole)
    for step in (2, 4, 6):
        damage(step_folder(run_folder / "checkpoints", step))
    new_run(run_folder, **again).train()
    assert sorted(drawn) == sorted(new_run(run_folder, **again).model.parameters)
    assert digests(run_folder) == digests(whole)


def test_a_damaged_checkpoint_is_not_sealed_into_the_stage(run_folder: Path) -> None:
    damage(step_folder(run_folder / "checkpoints", 4))
    keeping = {"checkpoint": {"every": 2, "keep_last": 3}} | SIX_STEPS
    with pytest.raises(InputError, match=r"step-00000004: this checkpoint is damaged: .*remove it"):
        new_run(run_folder, **keeping).train()
    shutil.rmtree(step_folder(run_folder / "checkpoints", 4))
    assert new_run(run_folder, **keeping).train()["step"] == 6


def test_other_names_are_no_checkpoints(run_folder: Path) -> None:
    root = run_folder / "checkpoints"
    (root / "step-best").mkdir()
    (root / "step-00000099").write_text("a file")
    (root / "step-7").mkdir()
    assert steps_in(root) == [2, 4, 6]


def test_a_file_too_many_makes_a_checkpoint_incomplete(run_folder: Path) -> None:
    """A checkpoint holds what its manifest names and nothing else: DCP would read a stray file of another run as its
    part. A run goes on from the checkpoint before."""
    newest = step_folder(run_folder / "checkpoints", 6)
    assert verified(newest)
    (newest / "__1_0.distcp").write_bytes(b"of another run")
    with pytest.raises(InputError, match=r"__1_0\.distcp"):
        verified(newest)
    run = new_run(run_folder, checkpoint={"every": 2}, **SIX_STEPS)
    run._resume()
    assert run.trainer.progress.step == 4


def test_prune_removes_the_others(run_folder: Path) -> None:
    prune(run_folder / "checkpoints", {4})
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_flipped_value_in_the_manifest_is_seen(run_folder: Path) -> None:
    path = step_folder(run_folder / "checkpoints", 6) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["metadata"]["trainer"]["progress"]["samples"] += 1
    path.write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")) + "\n")
    with pytest.raises(InputError, match=r"manifest.json: not a manifest"):
        verified(path.parent)


def test_a_checkpoint_of_another_model_is_passed_over(run_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    new_run(other, model=MODEL.model_copy(update={"layers": 2}), checkpoint={"every": 2}, **SIX_STEPS).train()
    shutil.rmtree(step_folder(run_folder / "checkpoints", 6))
    shutil.copytree(step_folder(other / "checkpoints", 6), step_folder(run_folder / "checkpoints", 6))
    run = new_run(run_folder, checkpoint={"every": 2, "keep_last": 3}, **SIX_STEPS)
    run._resume()
    assert run.trainer.progress.step == 4


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"model": {}}', b'{"model": {"layers": 1}, "vocab_size": 5}', b"\xff"]
)
def test_a_card_that_describes_no_model_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(InputError, match=r"model.json: does not describe a model"):
        read_model_config(tmp_path)


def test_saved_tensors_and_state_come_back(tmp_path: Path) -> None:
    config = SavedModelConfig.of(MODEL, vocab_size=11, end_of_document=3)
    tensors = {"model.a": torch.arange(6.0).view(2, 3), "optimizer.a.momentum": torch.ones(2, 3)}
    for root in ("one", "other"):
        content = CheckpointContent(tensors, config, {"trainer": {"step": 7}}, {"metrics.jsonl": b"{}"})
        save(tmp_path / root, 7, content, single_process())
    folder = tmp_path / "one" / "step-00000007"
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["step-00000007"]  # nothing hidden is left
    assert verified(folder) == {"trainer": {"step": 7}} and read_model_config(folder) == config
    found = {name: torch.zeros(2, 3) for name in tensors}
    load(folder, found, single_process())
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    files = sorted(path.name for path in folder.iterdir() if path.name != "manifest.json")  # which has times
    assert files == [".metadata", "__0_0.distcp", "metrics.jsonl", "model.json"]
    assert all((folder / name).read_bytes() == (tmp_path / "other/step-00000007" / name).read_bytes() for name in files)


def test_unreadable_metadata_is_one_error_without_torchs_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"\.metadata: cannot be read"):
        load(tmp_path, {"weight": torch.zeros(3)}, single_process())
    assert [record for record in caplog.records if record.name == "root"] == []


def test_ctrl_c_while_loading_is_ctrl_c(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps every exception of a rank in its own, which no command expects."""

    def interrupted(self: FileSystemReader, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(step_folder(whole / "checkpoints", 6))


def hashed_by_rank(root: Path) -> tuple[list[str], list[str]]:
    """Files that this rank hashes while it saves a checkpoint, and while it looks for the last one."""
    mesh = build_mesh(LayoutConfig(data=2), 1, torch.device("cpu"))
    hashed: list[str] = []
    original = known_digests.file_digest

    def counting(path: Path, on_progress: Callable[[], None]) -> str:
        hashed.append(path.name)
        return original(path, on_progress)

    config = SavedModelConfig.of(MODEL, vocab_size=11, end_of_document=3)
    own = DTensor.from_local(torch.ones(2, 3), mesh.data_grid, [Shard(0)])
    content = CheckpointContent({"model.a": own}, config, {"trainer": {}, "data": ""}, {"metrics.jsonl": b"{}"})
    with mock.patch.object(known_digests, "file_digest", counting):
        digests = DigestCache()
        save(root, 1, content, mesh, digests)
        saving = sorted(hashed)
        hashed.clear()
        found = newest_complete(root, config, Reporter.silent(), mesh, DigestCache())
        assert found is not None and found[0] == step_folder(root, 1)
        looking = sorted(hashed)
        hashed.clear()
        if mesh.is_first:
            verified(step_folder(root, 1), digests)
        assert hashed == []  # what is known is not computed again
    return saving, looking


def test_each_rank_hashes_what_it_wrote_and_a_share_of_what_it_resumes_from(pool: ForkedPool, tmp_path: Path) -> None:
    (first_saves, first_looks), (other_saves, other_looks) = pool.run(2, hashed_by_rank, tmp_path)
    assert first_saves == [".metadata", "__0_0.distcp", "metrics.jsonl", "model.json"]
    assert other_saves == ["__1_0.distcp"]
    assert sorted(first_looks + other_looks) == sorted(first_saves + other_saves)
    assert len(first_looks) == 3 and len(other_looks) == 2
