"""Weights of the layers in host memory or on disk: whole runs are bitwise those with weights on the device."""

import errno
from pathlib import Path
from typing import Any

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.metrics import read_metrics
from tests.support.training_runs import STEPS, digests, new_run


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    new_run(folder, layout={"micro_batch": 1}).train()
    return folder


@pytest.mark.parametrize("parameters", ["host", "disk"])
def test_streamed_weights_write_the_same_bytes(resident: Path, tmp_path: Path, parameters: str) -> None:
    """Four micro-batches a step; stopped after the first step, begun with weights on disk, and resumed."""
    layout = {"offload": {"parameters": parameters}, "micro_batch": 1}
    begun = {"offload": {"parameters": "disk"}, "micro_batch": 1}
    with pytest.raises(InputError, match="stopped after step 1 as requested"):
        new_run(tmp_path, layout=begun, checkpoint={"every": 3, "stop_after_seconds": 1e-9}).train()
    run = new_run(tmp_path, layout=layout)
    run.train()
    assert digests(tmp_path) == digests(resident)
    assert run.model.stream.max_held == 2


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "attention": {"recompute": "attention"},
    "operators": {"recompute": "operators"},
    "swap": {"recompute": "swap"},
    "tokens": {"recompute": "tokens", "offloaded_token_fraction": 0.5},
}


RARE = ("attention", "operators", "swap")  # by hand (-m slow)


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in POLICIES]
)
def test_with_every_policy_of_activations(resident: Path, tmp_path: Path, policy: str) -> None:
    layout = {"offload": {"parameters": "disk", "optimizer": "auto"}, "micro_batch": 1} | POLICIES[policy]
    new_run(tmp_path, layout=layout).train()
    assert digests(tmp_path) == digests(resident)


def test_with_muon_a_clipped_norm_and_skipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale begins so high that fp16 overflows."""
    monkeypatch.setattr("gristmill.training.optim.optimizer.INITIAL_SCALE", 2.0**24)
    folders = [tmp_path / "resident", tmp_path / "disk"]
    for folder, offload in zip(folders, ({}, {"parameters": "disk", "subgroup_parameters": 1}), strict=True):
        optimizer = {"name": "muon", "learning_rate": 1e-2, "clip_norm": 0.1}
        layout = {"offload": offload, "micro_batch": 2, "recompute": "full"}
        new_run(folder, layout=layout, precision="fp16", optimizer=optimizer).train()
    skipped = [line["step"] for line in read_metrics(folders[1] / "metrics.jsonl") if "skipped" in line]
    assert skipped and max(skipped) < STEPS
    assert digests(folders[0]) == digests(folders[1])


def test_a_run_begins_with_the_weights_of_a_checkpoint(resident: Path, tmp_path: Path) -> None:
    initial = str(step_folder(resident / "checkpoints", STEPS))
    folders = [tmp_path / "resident", tmp_path / "disk"]
    for folder, offload in zip(folders, ({}, {"parameters": "disk"}), strict=True):
        new_run(folder, layout={"offload": offload, "micro_batch": 1}, init_from=initial).train()
    assert digests(folders[0]) == digests(folders[1])


def test_a_full_disk_or_one_that_cannot_be_written_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gristmill.training.parallel.offload.weight_stream.os.posix_fallocate", full)
        with pytest.raises(InputError, match=r"bytes of the weights do not fit on this disk .*; free space"):
            new_run(tmp_path, layout={"offload": {"parameters": "disk"}})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="weights on disk need a file here, which cannot be made"):
        new_run(tmp_path, layout={"offload": {"parameters": "disk", "folder": str(tmp_path / "file")}})
