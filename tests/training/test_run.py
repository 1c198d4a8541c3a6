"""Whole runs: their files, and equal bytes after stops and kills."""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter, plain_console
from gristmill.training.checkpoint.checkpoint import load_model, step_folder
from gristmill.training.checkpoint.init_from import check_init_from
from gristmill.training.checkpoint.save import kept_steps
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import CheckpointConfig
from gristmill.training.engine.local_model import LocalModel
from gristmill.training.launch.processes import RankInfo, init_distributed
from gristmill.training.metrics import read_metrics
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.run import Run, RunConfig
from tests.support.training_runs import BATCH, MODEL, STEPS, Counting, digests, new_run, train_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    new_run(folder).train()
    return folder


def test_a_run_learns_and_says_what_it_did(undisturbed: Path) -> None:
    lines = read_metrics(undisturbed / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["tokens"] == STEPS * BATCH * MODEL.sequence_length
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert [line["step"] for line in lines if "validation" in line] == [6, 12]
    assert lines[0]["bits_per_byte"] == pytest.approx(lines[0]["loss"] / np.log(2) / 3.0)  # half of each source
    even = lines[-1]["validation"]["sources"]["even"]
    assert even["bits_per_byte"] == pytest.approx(even["loss"] / np.log(2) / 4.0)
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_equal_runs_write_equal_bytes(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path).train()
    assert digests(tmp_path) == digests(undisturbed)


def test_a_stopped_run_resumes_to_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stopped after step 1 as requested"):
        new_run(tmp_path, checkpoint={"every": 3, "stop_after_seconds": 1e-9}).train()
    log = io.StringIO()
    new_run(tmp_path, reporter=Reporter(plain_console(log))).train()
    assert digests(tmp_path) == digests(undisturbed)
    assert f"({BATCH * MODEL.sequence_length} tokens were done before)" in log.getvalue()


def test_a_damaged_checkpoint_is_passed_over(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path).train()
    (step_folder(tmp_path / "checkpoints", 12) / ".metadata").write_bytes(b"not what it was")
    new_run(tmp_path).train()
    assert digests(tmp_path) == digests(undisturbed)


def test_load_model_gives_the_model_that_was_validated(undisturbed: Path) -> None:
    model, config = load_model(step_folder(undisturbed / "checkpoints", STEPS))
    assert config == MODEL
    samples = Counting()
    logits = model(torch.stack([torch.from_numpy(samples.sample(k)["tokens"]) for k in range(5)]))
    targets = torch.stack([torch.from_numpy(samples.sample(k)["targets"]) for k in range(5)])
    weights = torch.stack([torch.from_numpy(samples.sample(k)["weights"]) for k in range(5)])
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    expected = read_metrics(undisturbed / "metrics.jsonl")[-1]["validation"]["loss"]
    assert ((losses * weights).sum() / weights.sum()).item() == pytest.approx(expected, rel=1e-5)


def test_saving_behind_the_steps_writes_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path, checkpoint={"every": 3, "asynchronous": True}).train()
    assert digests(tmp_path) == digests(undisturbed)


STATE_IN_HOST_MEMORY = {"optimizer": "interleaved", "stride": 2, "subgroup_parameters": 1}


def test_state_in_host_memory_writes_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    """Also when it stops and goes on, or saves behind the steps."""
    layout = {"offload": STATE_IN_HOST_MEMORY, "micro_batch": 4}
    with pytest.raises(InputError, match="stopped after step 1 as requested"):
        new_run(tmp_path, layout=layout, checkpoint={"every": 3, "stop_after_seconds": 1e-9}).train()
    new_run(tmp_path, layout=layout, checkpoint={"every": 3, "asynchronous": True}).train()
    assert digests(tmp_path) == digests(undisturbed)


def test_a_skipped_step_leaves_state_in_host_memory_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss scale begins so high that fp16 overflows; gradients clipped; micro-batches of one sample."""
    monkeypatch.setattr("gristmill.training.optim.optimizer.INITIAL_SCALE", 2.0**24)
    folders = [tmp_path / "device", tmp_path / "host"]
    for folder, offload in zip(folders, ({}, STATE_IN_HOST_MEMORY), strict=True):
        optimizer = {"learning_rate": 1e-2, "clip_norm": 0.1}
        new_run(folder, layout={"offload": offload, "micro_batch": 1}, precision="fp16", optimizer=optimizer).train()
    skipped = [line["step"] for line in read_metrics(folders[1] / "metrics.jsonl") if "skipped" in line]
    assert skipped and max(skipped) < STEPS
    assert digests(folders[0]) == digests(folders[1])


def test_fp16_finds_its_loss_scale_and_learns(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path, precision="fp16", optimizer={"learning_rate": 1e-2}).train()
    here, there = (read_metrics(folder / "metrics.jsonl") for folder in (undisturbed, tmp_path))
    assert there[-1]["loss"] == pytest.approx(here[-1]["loss"], abs=0.05)


ZBV = {"pipeline": 2, "pipeline_schedule": "zbv", "micro_batch": 1}
CHAIN = [  # each continues what the one before it saved
    ({"data": 2}, 3),
    ({"tensor": 2, "micro_batch": 1, "offload": STATE_IN_HOST_MEMORY}, 6),
    (ZBV, 9),
    ({"data": 1, "offload": {"optimizer": "cpu"}}, 12),
]
LONG_CHAIN = [  # by hand (-m slow)
    ({"data": 2}, 3),
    ({"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 1}, 6),
    (ZBV, 7),
    ({"data": 4, "replicate": 2, "tensor": 2, "micro_batch": 1, "offload": STATE_IN_HOST_MEMORY}, 9),
    ({"data": 1, "offload": {"optimizer": "cpu"}}, 12),
]


def run_until(folder: str, layout: dict[str, Any], step: int, asynchronous: bool) -> list[str]:
    """Trains up to a step and saves; the digests of the tokens this rank drew, by step."""
    config = train_config(layout=layout)
    mesh = build_mesh(config.layout, MODEL.num_kv_heads, torch.device("cpu"))
    run = new_run(Path(folder), mesh, layout=layout, checkpoint={"every": 3, "asynchronous": asynchronous})
    drawn: list[str] = []
    read = run.batches.take

    def take(first: int, count: int) -> dict[str, torch.Tensor]:
        batch = read(first, count)
        drawn.append(batch["tokens"].numpy().tobytes().hex() + f"@{mesh.data.rank}")
        return batch

    run.batches.take = take
    run._resume()
    while run.trainer.progress.step < step:
        run.trainer.step()
    run._save_if_due(True)
    return drawn


@pytest.mark.parametrize("chain", [CHAIN, pytest.param(LONG_CHAIN, marks=pytest.mark.slow)], ids=["two ranks", "eight"])
def test_a_checkpoint_of_any_layout_goes_on_on_any_other(pool, undisturbed: Path, tmp_path: Path, chain: list) -> None:
    streams = []
    for number, (layout, step) in enumerate(chain):
        world_size = train_config(layout=layout).layout.world_size
        ranks = pool.run(world_size, run_until, str(tmp_path), layout, step, number % 2 == 0)
        for drawn in zip(*ranks, strict=True):  # one step: the shares of the data ranks, in their order
            shares = {share.split("@")[1]: share.split("@")[0] for share in drawn}
            streams.append(hashlib.sha256("".join(shares[rank] for rank in sorted(shares)).encode()).hexdigest())
    expected, _ = load_model(step_folder(undisturbed / "checkpoints", STEPS))
    found, _ = load_model(step_folder(tmp_path / "checkpoints", STEPS))
    for name, value in found.named_parameters():
        torch.testing.assert_close(value, dict(expected.named_parameters())[name], rtol=0, atol=2e-5)
    whole = [
        torch.stack([torch.from_numpy(Counting().sample(k)["tokens"]) for k in range(s, s + 4)])
        for s in range(0, 48, 4)
    ]
    assert streams == [hashlib.sha256(batch.numpy().tobytes().hex().encode()).hexdigest() for batch in whole]


def test_a_step_that_is_not_finite_is_not_taken(tmp_path: Path) -> None:
    run = new_run(tmp_path, tokens=4 * BATCH * MODEL.sequence_length)
    train, before = run.trainer.forward_backward.train, {}

    def broken_at_step_3(batch: dict[str, torch.Tensor], factor: float, begin: Any) -> torch.Tensor:
        losses = train(batch, factor, begin)
        if run.trainer.progress.step == 2:
            before.update({name: value.detach().clone() for name, value in run.model.parameters.items()})
            run.model.parameters["head.weight"].grad[0, 0] = float("inf")
        elif run.trainer.progress.step == 3:
            assert all(torch.equal(before[name], value) for name, value in run.model.parameters.items())
        return losses

    run.trainer.forward_backward.train = broken_at_step_3
    assert run.train()["skipped_steps"] == 1
    line = read_metrics(tmp_path / "metrics.jsonl")[2]
    assert line["skipped"].endswith("gradient norm inf: not finite")
    assert line["samples"] == list(range(2 * BATCH, 3 * BATCH))
    assert line["grad_norm"] is None


def test_a_step_waits_once_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these waits for all that was launched before."""
    run, waits, phases = new_run(tmp_path), [], []  # the batch is checked before it goes to the device
    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *arguments: Any, name: str = name, original: Any = original) -> Any:
            if phases and threading.current_thread() is threading.main_thread():  # another one makes the next batch
                waits.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)
    run.trainer.step(on_phase=lambda phase: phases.append(phase) if "data" not in phase else None)
    assert waits == ["tolist"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, asynchronous: bool
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("gristmill.training.checkpoint.checkpoint._Writer.write_data", failing)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        new_run(tmp_path, checkpoint={"every": 3, "asynchronous": asynchronous}).train()
    assert caught.value.errno == number
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    new_run(tmp_path, tokens=3 * BATCH * MODEL.sequence_length, monitoring={"profile_steps": [2]}).train()
    trace = json.loads((tmp_path / "logs" / "trace-00000002-rank0.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])


def scores_of(parts: LocalModel) -> dict[str, dict[str, float]]:
    """A stand-in for the tasks: it reads the live weights."""
    return {"a_task": {"acc": float(parts.parameters["final_norm.weight"].double().sum())}}


def test_scores_along_the_way_are_those_of_an_unbroken_run(tmp_path: Path) -> None:
    asked = {"evaluation": {"every": 4, "tasks": ["a_task"]}}
    new_run(tmp_path / "unbroken", evaluate=scores_of, **asked).train()
    lines = read_metrics(tmp_path / "unbroken" / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines[0]["tokens"] == 4 * BATCH * MODEL.sequence_length and lines[0]["scores"] != lines[1]["scores"]

    def killed_at_10(parts: LocalModel) -> dict[str, dict[str, float]]:
        if len(read_metrics(tmp_path / "broken" / "evaluations.jsonl")) == 2:
            raise KeyboardInterrupt  # the last checkpoint is step 9's
        return scores_of(parts)

    with pytest.raises(KeyboardInterrupt):
        new_run(tmp_path / "broken", evaluate=killed_at_10, **asked).train()
    metadata = new_run(tmp_path / "broken", evaluate=scores_of, **asked).train()
    assert digests(tmp_path / "broken") == digests(tmp_path / "unbroken")
    assert metadata["evaluation"] == lines[-1]["scores"]


def weights_and_metrics(folder: Path) -> dict[str, str]:
    """Without the scores, their copies in checkpoints, and the manifests that list the copies."""
    left_out = ("evaluations.jsonl", "manifest.json")
    return {name: digest for name, digest in digests(folder).items() if not name.endswith(left_out)}


def test_asking_the_model_changes_nothing_of_the_run(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path, evaluate=scores_of, evaluation={"every": 5}).train()
    assert weights_and_metrics(tmp_path) == weights_and_metrics(undisturbed)


def test_a_run_begins_with_the_weights_of_another(undisturbed: Path, tmp_path: Path) -> None:
    last = step_folder(undisturbed / "checkpoints", STEPS)
    run = new_run(tmp_path, init_from=str(last))
    run._resume()
    expected, _ = load_model(last)
    for name, value in expected.named_parameters():
        assert torch.equal(run.model.parameters[name], value)
    assert run.trainer.progress.step == 0 and not run.optimizer.first["head.weight"].any()
    new_run(tmp_path, init_from=str(last)).train()
    first = read_metrics(tmp_path / "metrics.jsonl")[0]["loss"]
    assert first < read_metrics(undisturbed / "metrics.jsonl")[0]["loss"] - 0.3
    before = digests(tmp_path)
    (step_folder(tmp_path / "checkpoints", STEPS) / ".metadata").write_bytes(b"damaged")
    new_run(tmp_path, init_from=str(last)).train()  # goes on from step 9, not from the other's weights
    assert digests(tmp_path) == before


def test_a_run_with_longer_samples_may_scale_the_rotary_positions(undisturbed: Path) -> None:
    """The second phase of a two-phase recipe."""
    last = step_folder(undisturbed / "checkpoints", STEPS)
    longer = MODEL.model_dump() | {"sequence_length": 64, "rope_scaling": {"rope_type": "ntk", "factor": 4}}
    saved = {"vocab_size": 50, "end_of_document": 0}
    check_init_from(last, saved | {"model": longer})
    with pytest.raises(InputError, match="rope_scaling null instead of"):
        check_init_from(last, saved | {"model": longer | {"sequence_length": 16}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 2, "kv_heads": 0}, "head_width 8 instead of 16; heads 4 instead of 2"),
        ({"qk_norm": True}, "qk_norm false instead of true; set the recipe's model as"),
        ({"ffn_hidden_size": 32}, "ffn_hidden_size 128 instead of 32"),
        ({"rope_base": 20000.0}, "rope_base 10000.0 instead of 20000.0"),
    ],
)
def test_weights_of_another_model_are_refused(
    undisturbed: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    other = ModelConfig(**(MODEL.model_dump() | changes))
    data = TrainingData(Counting(), None, 0, mask_documents=False, bytes_per_token={})
    last = step_folder(undisturbed / "checkpoints", STEPS)
    run = Run(
        RunConfig(other, train_config(init_from=str(last)), 7), data, single_process(), tmp_path, Reporter.silent()
    )
    with pytest.raises(InputError, match=said):
        run.train()


def test_weights_of_another_vocabulary_are_refused(undisturbed: Path, tmp_path: Path) -> None:
    data = TrainingData(Counting(), None, 3, mask_documents=False, bytes_per_token={})
    last = step_folder(undisturbed / "checkpoints", STEPS)
    run = Run(
        RunConfig(MODEL, train_config(init_from=str(last)), 7), data, single_process(), tmp_path, Reporter.silent()
    )
    with pytest.raises(InputError, match="trained with end_of_document 0, this run's data has 3"):
        run.train()


def test_the_loader_does_not_keep_the_steps_waiting(undisturbed: Path) -> None:
    """Both are counted in the run; of a model this small the share says nothing."""
    for line in read_metrics(undisturbed / "logs" / "timing.jsonl"):
        assert line["data_share"] == pytest.approx(line["seconds"]["data"] / sum(line["seconds"].values()))


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name in ("killed once", "never killed"):
        arguments = ["--max-restarts", "1", "-m", "tests.training.test_run", str(tmp_path / name), name]
        subprocess.run([*torchrun, *arguments], env=environment, check=True, cwd=ROOT)
    (tmp_path / "killed once" / "killed").unlink()
    assert digests(tmp_path / "killed once") == digests(tmp_path / "never killed")


def test_other_data_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    new_run(tmp_path).train()
    other = new_run(tmp_path)
    other.data_fingerprint = "other"
    with pytest.raises(InputError, match="trained on other data"):
        other.train()


def run_on_mesh(folder: str, layout: dict[str, Any], monitoring: dict[str, Any]) -> None:
    mesh = build_mesh(train_config(layout=layout).layout, MODEL.num_kv_heads, torch.device("cpu"))
    new_run(Path(folder), mesh, layout=layout, monitoring=monitoring, checkpoint={"every": 0}).train()


@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2, "pipeline": 2}])
def test_any_layout_writes_the_losses_of_one_process(pool, undisturbed: Path, tmp_path: Path, layout: dict) -> None:
    """And where the time of each step went."""
    pipelined, layout = "pipeline" in layout, layout | {"micro_batch": 1}
    world_size = train_config(layout=layout).layout.world_size
    pool.run(world_size, run_on_mesh, str(tmp_path), layout, {"communication_every": 6})
    here, there = (read_metrics(folder / "metrics.jsonl") for folder in (undisturbed, tmp_path))
    assert [line["loss"] for line in there] == pytest.approx([line["loss"] for line in here], rel=1e-5)
    assert there[-1]["validation"]["loss"] == pytest.approx(here[-1]["validation"]["loss"], rel=1e-5)
    assert json.dumps(here[0]["valid_tokens"]) == json.dumps(there[0]["valid_tokens"])
    lines = read_metrics(tmp_path / "logs" / "timing.jsonl")
    phases = ["data", "token_count_allreduce", *["pipeline"] * pipelined, "forward", "backward", "optimizer"]
    assert list(lines[0]["seconds"]) == phases
    assert [line["step"] for line in lines if "communication_seconds" in line] == [6, 12]
    assert lines[5]["communication_seconds"] > 0 and lines[5]["memory_bytes"] > 10**7


def test_which_checkpoints_stay() -> None:
    assert kept_steps([100, 137, 200, 300], CheckpointConfig(every=100, keep_last=2), finished=False) == {200, 300}
    assert kept_steps([100, 137], CheckpointConfig(every=100), finished=False) == {100, 137}
    assert kept_steps([100, 137, 200, 250], CheckpointConfig(every=100), finished=True) == {200, 250}
    assert kept_steps([100, 200, 300, 400], CheckpointConfig(every=100, keep_last=1, keep_every=200), True) == {
        200,
        400,
    }


def on_two_ranks(folder: Path, kill_once: bool) -> None:
    """Under torchrun. Rank 1 kills itself at step 5 of its first life."""
    place = RankInfo.from_environment()
    config = train_config(layout={"data": 2})
    with init_distributed(place, config.layout, MODEL, "recipe", 60) as mesh:
        run = new_run(folder, mesh, layout={"data": 2})
        step = run.trainer.step

        def killed_at_five(*arguments: Any) -> Any:
            if kill_once and place.rank == 1 and run.trainer.progress.step == 5 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        run.trainer.step = killed_at_five
        run.train()


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]), sys.argv[2] == "killed once")
