"""The example mixer of docs/architecture.md, as a file beside the others, trains on three layouts as in one process."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gristmill.training.config.mixer import installed_mixers
from gristmill.training.config.model import ModelConfig
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from tests.support.model_counts import count_parameters
from tests.support.parity import MODELS, Case, Outcome, mesh_of_group, outcome, relative, worst

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
LAYOUTS = [
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2, "pipeline_schedule": "zbv"},
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "running_mean.py").write_text(block)
    return str(tmp_path)


def with_mixer(folder: str, layout: dict[str, Any]) -> Outcome:
    """The outcome of a layout, with the folder's mixers beside ours."""
    package = importlib.import_module("gristmill.training.config.mixers")
    before, MODELS["running_mean"] = package.__path__, {"mixer": "running_mean", "layers": 4}
    package.__path__ = [*before, folder]
    try:
        case = Case(layout, "running_mean", documents=True)
        model = case.configs[0]
        assert parameter_count(shape_of(model, 51)) == count_parameters(model, 51)
        if "pipeline" in layout or dist.is_initialized():
            return outcome(case, mesh_of_group(*case.configs))
        return outcome(case, single_process())
    finally:
        package.__path__ = before
        del MODELS["running_mean"]


def test_the_example_trains_on_three_layouts(folder: str, pool: Any) -> None:
    alone = with_mixer(folder, {"data": 1, "micro_batch": 2})
    assert "layers.3.mixer.value.weight" in alone.parameters
    for layout in LAYOUTS:
        for rank in pool.run(2, with_mixer, folder, layout):
            assert relative(rank.losses, alone.losses) < 1e-12
            assert worst(rank.gradients, alone.gradients) < 1e-12
            assert worst(rank.parameters, alone.parameters) < 1e-12


def test_without_its_file_the_name_is_unknown() -> None:
    with pytest.raises(
        ValueError,
        match="there is no mixer 'running_mean'; mixers are attention, latent_attention, mamba2, tcnca, none",
    ):
        ModelConfig(layers=1, width=8, heads=1, mixer="running_mean")


def test_a_package_offers_a_mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the entry points gristmill.mixers."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mill_mixers.py").write_text(block)
    info = tmp_path / "mill_mixers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mill-mixers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gristmill.mixers]\nrunning_mean = mill_mixers:RunningMean\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_mixers.cache_clear()
    try:
        model = ModelConfig(layers=1, width=8, heads=1, mixer="running_mean")
        assert parameter_count(shape_of(model, 51)) == count_parameters(model, 51)
    finally:
        monkeypatch.undo()
        installed_mixers.cache_clear()
