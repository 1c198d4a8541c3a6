"""Faults of a run are named first; a healthy run has none."""

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.explain import AXES, Explanation, RunComparison, RunLogs, explain_run
from gristmill.training.planner.hardware import Device, Hardware, Link, load_hardware
from tests.support.faulty_runs import (
    DENSE,
    EXPERTS,
    LENGTH,
    VOCABULARY,
    FaultyRun,
    calibrated,
    limit_link,
    pool_in_own_network,
    train_with_fault,
    why_not,
)

DATA, TENSOR, PIPELINE = (
    {axis: 2, "micro_batch": size} for axis, size in (("data", 8), ("tensor", 16), ("pipeline", 2))
)
BUSY = DATA | {"expert": 2}
CPU = Hardware(
    name="measured",
    device=Device(
        memory_gib=16,
        memory_tb_per_second=0.03,
        memory_efficiency=0.6,
        matmul_tflops=0.2,
        multiprocessors=1,
        kernel_microseconds=5,
        layer_microseconds=500,
    ),
    node_gpus=2,
    node_link=Link(kind="memory", gb_per_second=1.0, latency_microseconds=100),
    network=Link(kind="ethernet", gb_per_second=1.25),
)


def write_logs(folder: Path, layout: dict[str, Any], model: dict[str, Any] = DENSE, **changes: Any) -> Explanation:
    """Logs of 12 steps that go as the forecast says, and what is explained of them. changes: of every measured step.
    slow: times as long as the forecast that rank 1 works."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    train = TrainConfig(tokens=16 * LENGTH * 12, batch_tokens=16 * LENGTH, precision="fp32", layout=layout)
    (folder / "model.json").write_text(json.dumps({"model": model, "vocab_size": VOCABULARY, "end_of_document": 0}))
    run = {"device": "cpu", "processes": train.layout.world_size, "train": train.model_dump(mode="json")}
    (logs / "run.json").write_text(json.dumps(run))
    (logs / "timing.jsonl").write_text("".join(line_of_step(step, 0.1, changes) for step in range(1, 13)))
    forecast = RunComparison(RunLogs(folder), CPU).forecast.time
    work = forecast.matmul + forecast.attention + forecast.memory + forecast.optimizer
    waits = changes.get("data", 0.0)
    sent = sum(getattr(forecast, axis) for axis in AXES) + forecast.bubble
    total = work * max(1.0, changes.get("slow", 1.0)) + sent + waits
    (logs / "timing.jsonl").write_text("".join(line_of_step(step, total, changes) for step in range(1, 13)))
    ranks = [
        {"busy": time, "processor": time, "data": waits, "communication": total - time - waits}
        | {"optimizer": forecast.optimizer}
        for time in (work, work * changes.get("slow", 1.0))
    ]
    axes = [axis for axis in AXES if layout.get(axis, 1) > 1]
    probe = {"4096": 1e-4 + 2048e-9, "4194304": 1e-4 + changes.get("link", 1.0) * 2097152e-9}
    record = {"step": 10, "ranks": ranks, "links": dict.fromkeys(axes, probe)} | changes.get("record", {})
    (logs / "ranks.jsonl").write_text(json.dumps(record) + "\n")
    return explain_run(folder, CPU)


def line_of_step(step: int, total: float, changes: dict[str, Any]) -> str:
    data = changes.get("data", 0.0)
    return json.dumps({"step": step, "seconds": {"data": data, "forward": total - data, "optimizer": 0.0}}) + "\n"


@pytest.mark.parametrize("layout", [DATA, TENSOR, PIPELINE, BUSY])
def test_a_run_as_forecast_has_no_cause(tmp_path: Path, layout: dict[str, Any]) -> None:
    explanation = write_logs(tmp_path, layout, EXPERTS if "expert" in layout else DENSE)
    assert explanation.named == []
    assert explanation.terms[-1].measured == pytest.approx(explanation.forecast.time.total, rel=0.01)


@pytest.mark.parametrize(
    ("cause", "layout", "changes"),
    [
        ("slow loader", DATA, {"data": 0.1}),
        ("slow rank", TENSOR, {"slow": 1.6}),
        ("slow link, data", DATA, {"link": 8.0}),
        ("slow link, tensor", TENSOR, {"link": 4.0}),
        ("imbalance of experts", BUSY, {"record": {"rank_load": 1.9}}),
        ("micro-batch", DATA | {"micro_batch": 1}, {}),
    ],
)
def test_the_fault_is_named_first(tmp_path: Path, cause: str, layout: dict[str, Any], changes: dict[str, Any]) -> None:
    explanation = write_logs(tmp_path, layout, EXPERTS if "expert" in layout else DENSE, **changes)
    assert explanation.named[0].name == cause
    assert explanation.named[0].advice


def test_other_programs_are_a_note_and_no_cause(tmp_path: Path) -> None:
    write_logs(tmp_path, DATA)
    path = tmp_path / "logs" / "ranks.jsonl"
    record = json.loads(path.read_text())
    record["ranks"][1]["busy"] *= 1.5
    path.write_text(json.dumps(record) + "\n")
    explanation = explain_run(tmp_path, CPU)
    assert explanation.named == []
    assert "rank 1" in explanation.notes[0]


def test_one_process_says_that_other_programs_were_not_measured(tmp_path: Path) -> None:
    write_logs(tmp_path, {"data": 1})
    (tmp_path / "logs" / "ranks.jsonl").unlink()
    explanation = explain_run(tmp_path, CPU)
    assert [term.measured for term in explanation.terms if term.name == "other programs"] == [None]
    assert explanation.notes[0].startswith("What other programs took of the processor was not measured")


def test_what_is_no_run_or_ran_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the folder of a training run"):
        explain_run(tmp_path, CPU)
    write_logs(tmp_path / "run", DATA)
    with pytest.raises(InputError, match="not a profile of the run's device"):
        explain_run(tmp_path / "run", load_hardware("h100"))


WIDE_EXPERTS = EXPERTS | {"moe": EXPERTS["moe"] | {"ffn_hidden_size": 768}}
SMALL = DENSE | {"layers": 2, "width": 32}


def test_a_run_with_a_slow_loader_on_two_processes(pool: Any, tmp_path: Path) -> None:
    """The run writes what the explanation reads."""
    pool.run(2, train_with_fault, str(tmp_path), FaultyRun("loader", "", DATA, SMALL, loader=0.06))
    logs = RunLogs(tmp_path)
    assert [record["step"] for record in logs.records] == [4, 8, 12, 16]
    assert logs.model == ModelConfig(**SMALL) and len(logs.by_rank("busy")) == 2 and logs.link("data")
    assert explain_run(tmp_path, CPU).named[0].name == "slow loader"


# Twenty faults and eight healthy runs beside a profile that was measured just before.
FAULTS = (
    FaultyRun("data link 4", "slow link, data", DATA, rate="3gbit"),
    FaultyRun("data link 1", "slow link, data", DATA, rate="1gbit"),
    FaultyRun("tensor link 2", "slow link, tensor", TENSOR, rate="2gbit"),
    FaultyRun("tensor link 1", "slow link, tensor", TENSOR, rate="1gbit"),
    FaultyRun("rank 1 of data", "slow rank", DATA, slow_layer=0.03),
    FaultyRun("rank 0 of data", "slow rank", DATA, slow_layer=0.06, slow_rank=0),
    FaultyRun("rank 0 of tensor", "slow rank", TENSOR, slow_layer=0.04, slow_rank=0),
    FaultyRun("rank 1 of pipeline", "slow rank", PIPELINE, slow_layer=0.02),
    FaultyRun("busy experts", "imbalance of experts", BUSY, EXPERTS, busy=100.0),
    FaultyRun(
        "busier by top 1", "imbalance of experts", BUSY, EXPERTS | {"moe": EXPERTS["moe"] | {"top_k": 1}}, busy=9.0
    ),
    FaultyRun("busy wide experts", "imbalance of experts", BUSY, WIDE_EXPERTS, busy=9.0),
    FaultyRun("busy and more samples", "imbalance of experts", BUSY, EXPERTS, samples=32, busy=100.0),
    FaultyRun("loader", "slow loader", DATA, loader=0.2),
    FaultyRun("slower loader", "slow loader", DATA, loader=0.3),
    FaultyRun("loader of tensor", "slow loader", TENSOR, loader=0.12),
    FaultyRun("loader of pipeline", "slow loader", PIPELINE, loader=0.12),
    FaultyRun("micro-batch 1 of data", "micro-batch", DATA | {"micro_batch": 1}),
    FaultyRun("micro-batch 2 of data", "micro-batch", DATA | {"micro_batch": 2}),
    FaultyRun("micro-batch 1 of tensor", "micro-batch", TENSOR | {"micro_batch": 1}),
    FaultyRun("micro-batch 2 of tensor", "micro-batch", TENSOR | {"micro_batch": 2}),
)
# With the largest micro-batch, or enough of them for a pipeline.
HEALTHY = (
    FaultyRun("data", "", DATA),
    FaultyRun("data of 32", "", DATA | {"micro_batch": 16}, samples=32),
    FaultyRun("tensor", "", TENSOR),
    FaultyRun("tensor of 32", "", TENSOR | {"micro_batch": 32}, samples=32),
    FaultyRun("pipeline", "", PIPELINE),
    FaultyRun("pipeline of 32", "", PIPELINE, samples=32),
    FaultyRun("experts", "", BUSY, EXPERTS),
    FaultyRun("experts of 32", "", BUSY | {"micro_batch": 16}, EXPERTS, samples=32),
)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_eighteen_of_twenty_faults_are_named_first_and_healthy_runs_have_none(tmp_path: Path) -> None:
    rights, lines = {True: 0, False: 0}, []
    with pool_in_own_network(2) as pool:
        hardware = pool.run(2, calibrated, 3, timeout_seconds=300)[0]
        for number, case in enumerate((*FAULTS, *HEALTHY)):
            folder = tmp_path / str(number)
            pool.run(1, limit_link, case.rate)
            pool.run(2, train_with_fault, str(folder), case, timeout_seconds=300)
            pool.run(1, limit_link, "")
            explanation = explain_run(folder, hardware)
            names = [f"{cause.name} {cause.lost / explanation.own_seconds:.0%}" for cause in explanation.named]
            right = names[0].startswith(case.cause) if case.cause and names else bool(case.cause) == bool(names)
            rights[bool(case.cause)] += right
            lines.append(f"{case.name}: {names}{'' if right else '   WRONG'} {explanation.notes[:-1]}")
            print(lines[-1], flush=True)
    assert rights[True] >= 18, "\n".join(lines)
    assert rights[False] == len(HEALTHY), "\n".join(lines)
