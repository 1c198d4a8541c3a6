"""The objectives of docs/objectives.md, as they stand there: each trains alike in one process and on two layouts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.parallel.mesh import build_mesh
from tests.support.training_runs import MODEL, new_run

PAGE = Path(__file__).parents[3] / "docs/objectives.md"
FILES = {
    name: source for name, source in re.findall(r"```python\n# (\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
}
OBJECTIVES = {"contrastive": "Contrastive", "labelling": "Repeats", "preference": "Preference"}
TAGS = ModelConfig.model_validate(MODEL.model_dump() | {"outputs": [{"name": "tags", "size": 2, "over": "tokens"}]})
LAYOUTS = [{"data": 2}, {"tensor": 2}]
RARE = [{"data": 2, "pipeline": 2, "pipeline_schedule": "zbv"}]  # by hand (-m slow)


def test_the_page_has_three_files_of_20_to_40_lines() -> None:
    assert FILES.keys() == {"by_hand", *OBJECTIVES}
    for name in OBJECTIVES:
        assert 20 <= len(FILES[name].splitlines()) <= 40, name


def test_the_example_by_hand() -> None:
    exec(compile(FILES["by_hand"], "by_hand", "exec"), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    for name, source in FILES.items():
        (folder / f"{name}.py").write_text(source)
    new_run(folder / "reference", precision="fp64", checkpoint={"every": 0}, tokens=4 * 16).train()
    return folder


def settings(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "objective": f"{folder / name}.py:{OBJECTIVES[name]}",
        "precision": "fp64",
        "checkpoint": {"every": 0},
        "tokens": 5 * 4 * 16,
        "validation": {"every": 5, "samples": 5},
        "optimizer": {"learning_rate": 1e-2},
    }
    if name == "preference":
        found["teacher"] = {"checkpoint": str(step_folder(folder / "reference/checkpoints", 1))}
    return found


def model_of(name: str) -> ModelConfig:
    return TAGS if name == "labelling" else MODEL


def train_on_mesh(folder: Path, name: str, run: Path, layout: dict[str, Any]) -> None:
    mesh = build_mesh(LayoutConfig(**layout), MODEL.num_kv_heads, torch.device("cpu"))
    new_run(run, mesh, model=model_of(name), layout=layout | {"micro_batch": 1}, **settings(folder, name)).train()


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(RARE, marks=pytest.mark.slow)], ids=["two ranks", "four"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_the_page_trains_alike_on_every_layout(
    name: str, layouts: list[dict[str, Any]], folder: Path, pool: Any
) -> None:
    alone_folder = folder / f"alone {name} {len(layouts)}"
    new_run(alone_folder, model=model_of(name), **settings(folder, name)).train()
    alone = read_metrics(alone_folder / METRICS_NAME)
    assert len(alone) == 5 and "validation" in alone[-1]
    for layout in layouts:
        run = folder / f"{layout} {name}"
        world = LayoutConfig(**layout).world_size
        pool.run(world, train_on_mesh, folder, name, run, layout)
        for one, other in zip(alone, read_metrics(run / METRICS_NAME), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)
        assert other["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-9)
