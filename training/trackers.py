"""Trackers of experiments: TensorBoard, Weights & Biases and MLflow, each by its own library."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.train import TRACKER_PACKAGES, MonitoringConfig


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in logs/tensorboard; those of steps after `step` are hidden."""

    def __init__(self, logs: Path, step: int):
        self._writer = SummaryWriter(str(logs / "tensorboard"), purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project; a resumed training goes on in it. Its own environment variables (WANDB_MODE ...) apply."""

    def __init__(self, project: str, logs: Path):
        wandb = _library("wandb")
        stored = logs / "wandb_run"
        run_id = stored.read_text("utf-8") if stored.is_file() else None
        self._run = wandb.init(project=project, dir=str(logs), id=run_id, resume="allow")
        stored.write_text(self._run.id, "utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment; a resumed training goes on in it. MLFLOW_TRACKING_URI says where; without it, as MLflow
    does."""

    def __init__(self, experiment: str, logs: Path):
        self._mlflow = _library("mlflow")
        self._mlflow.set_experiment(experiment)
        stored = logs / "mlflow_run"
        run_id = stored.read_text("utf-8") if stored.is_file() else None
        self._run_id = self._mlflow.start_run(run_id=run_id).info.run_id
        stored.write_text(self._run_id, "utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        # MLflow's names allow neither brackets nor other signs than these
        named = {"".join(c if c.isalnum() or c in "_-. /" else "_" for c in name): v for name, v in values.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.end_run()


def start_trackers(monitoring: MonitoringConfig, logs: Path, step: int) -> list[Tracker]:
    """The trackers of the recipe, for a run that begins after `step`. Raises RecipeError if a package is
    absent."""
    trackers: list[Tracker] = []
    for name in monitoring.trackers:
        if name == "tensorboard":
            trackers.append(TensorBoard(logs, step))
        elif name == "wandb":
            trackers.append(WeightsAndBiases(monitoring.project, logs))
        else:
            trackers.append(MLflow(monitoring.project, logs))
    return trackers


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"train.monitoring.trackers names {name}, which is not installed; pip install {TRACKER_PACKAGES[name]}"
        ) from error
