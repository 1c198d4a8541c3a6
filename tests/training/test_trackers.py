"""Trackers get every number of a run by their own libraries, and a resumed run goes on in the same run of theirs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.train import MonitoringConfig
from gristmill.training.metrics import read_metrics, start_trackers
from tests.support.training_runs import BATCH, MODEL, new_run


class Library:
    """Records what wandb and mlflow are called with, as their documentation names the functions."""

    def __init__(self):
        self.starts, self.logged, self.ended = [], [], 0
        self.experiment = None

    def init(self, project, dir, id, resume):
        self.experiment = project
        self.starts.append(id)
        return SimpleNamespace(
            id="w1", log=lambda values, step: self.logged.append((step, values)), finish=self.end_run
        )

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, run_id):
        self.starts.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

    def log_metrics(self, values, step, run_id):
        assert run_id == "m1"
        self.logged.append((step, values))

    def end_run(self):
        self.ended += 1


@pytest.fixture
def libraries(monkeypatch):
    made = {name: Library() for name in ("wandb", "mlflow")}
    for name, library in made.items():
        monkeypatch.setitem(sys.modules, name, library)
    return made


def test_every_tracker_gets_the_losses_of_metrics_jsonl(tmp_path: Path, libraries):
    monitoring = {"trackers": ["tensorboard", "wandb", "mlflow"], "project": "mill"}
    new_run(tmp_path, tokens=2 * BATCH * MODEL.sequence_length, monitoring=monitoring).train()
    losses = [(record["step"], record["loss"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(losses) == 2
    for library in libraries.values():
        assert [(step, values["loss"]) for step, values in library.logged if "loss" in values] == losses
        assert library.experiment == "mill" and library.starts == [None] and library.ended == 1
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    board = [(event.step, event.value) for event in events.Scalars("loss")]
    assert board == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]


def test_a_resumed_run_goes_on_in_the_same_run(tmp_path: Path, libraries):
    monitoring = MonitoringConfig(trackers=("wandb", "mlflow"))
    for _ in range(2):
        for tracker in start_trackers(monitoring, tmp_path, 0):
            tracker.close()
    assert libraries["wandb"].starts == [None, "w1"] and libraries["mlflow"].starts == [None, "m1"]


def test_names_that_mlflow_does_not_take(tmp_path: Path, libraries):
    (tracker,) = start_trackers(MonitoringConfig(trackers=("mlflow",)), tmp_path, 0)
    tracker.log({"evaluation/piqa/acc,none": 0.5}, 3)
    assert libraries["mlflow"].logged == [(3, {"evaluation/piqa/acc_none": 0.5})]


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RecipeError, match="names wandb, which is not installed; pip install wandb"):
        start_trackers(MonitoringConfig(trackers=("wandb",)), tmp_path, 0)
