"""Training runs on models of transformers: layouts agree, a run resumes, and transformers opens what it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.training.auto_tp.transformers_folder import open_causal_folder, open_folder
from gristmill.training.checkpoint.checkpoint import TRANSFORMERS
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import build_mesh, single_process
from gristmill.training.run import Run, RunConfig
from tests.support.training_runs import Counting, train_config
from tests.support.transformers_models import tiny_model


def train(source: Path, folder: Path, tensor: int = 1, data: int = 1, checkpoint: Any = None) -> list[float]:
    """The losses of the run's steps."""
    layout = LayoutConfig(data=data, tensor=tensor)
    mesh = build_mesh(layout, tensor, torch.device("cpu")) if layout.world_size > 1 else single_process()
    folder.mkdir(parents=True, exist_ok=True)
    config = train_config(layout=layout, checkpoint=checkpoint or {"every": 3})
    model = ModelConfig(transformers=str(source), sequence_length=16)
    samples = TrainingData(Counting(), Counting(), 0, mask_documents=False, bytes_per_token={"even": 4.0, "odd": 4.0})
    run = Run(RunConfig(model, config, 1, open_causal_folder(source)), samples, mesh, folder, Reporter.silent())
    run.train()
    return [line["loss"] for line in read_metrics(folder / METRICS_NAME)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = tiny_model("gpt2")
    model.config.use_cache = True  # as in the folders of others
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_layouts_train_the_same_model_and_transformers_opens_it(source: Path, tmp_path: Path, pool: Any) -> None:
    (alone,) = pool.run(1, train, source, tmp_path / "alone")
    sharded = pool.run(4, train, source, tmp_path / "sharded", 2, 2)
    assert alone[-1] < 0.8 * alone[0]
    assert sharded[0] == pytest.approx(alone, abs=1e-4)
    one, four = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / TRANSFORMERS).state_dict()
        for name in ("alone", "sharded")
    )
    before = tiny_model("gpt2").state_dict()
    assert open_folder(tmp_path / "sharded" / TRANSFORMERS).caches is True
    assert one.keys() == four.keys() == before.keys()
    for name, weight in one.items():
        assert torch.allclose(weight, four[name], atol=1e-3), name
    assert not torch.equal(one["transformer.wte.weight"], before["transformer.wte.weight"])


def test_experts_of_two_ranks_are_written_as_transformers_holds_them(tmp_path: Path, pool: Any) -> None:
    """A run of Mixtral on tensor ranks gives the folder that one process gives."""
    source = tmp_path / "source"
    tiny_model("mixtral").save_pretrained(source)
    (alone,) = pool.run(1, train, source, tmp_path / "alone")
    sharded = pool.run(2, train, source, tmp_path / "sharded", 2)
    assert sharded[0] == pytest.approx(alone, abs=1e-4)
    one, two = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / TRANSFORMERS).state_dict()
        for name in ("alone", "sharded")
    )
    assert one.keys() == two.keys() == tiny_model("mixtral").state_dict().keys()
    assert all(torch.allclose(weight, two[name], atol=1e-3) for name, weight in one.items())


@pytest.mark.slow
def test_a_run_resumes_on_another_layout(source: Path, tmp_path: Path, pool: Any) -> None:
    whole = pool.run(1, train, source, tmp_path / "whole")[0]
    with pytest.raises(Exception, match="stopped after step 1"):
        pool.run(1, train, source, tmp_path / "stopped", 1, 1, {"stop_after_seconds": 1e-9})
    assert len(read_metrics(tmp_path / "stopped" / METRICS_NAME)) == 1
    resumed = pool.run(2, train, source, tmp_path / "stopped", 2, 1)[0]
    assert resumed == pytest.approx(whole, abs=1e-4)


def test_folders_that_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: absent"):
        open_folder(tmp_path / "nothing")
    config = source / "config.json"
    text = config.read_text("utf-8")
    config.write_text(text.replace("{", '{"auto_map": {"AutoModel": "code.Model"},', 1), "utf-8")
    with pytest.raises(InputError, match="which is not run"):
        open_folder(source)
    config.write_text(text.replace("GPT2LMHeadModel", "NoSuchModel"), "utf-8")
    with pytest.raises(InputError, match="NoSuchModel"):
        open_folder(source)
    config.write_text(text.replace("GPT2LMHeadModel", "GPT2ForSequenceClassification"), "utf-8")
    with pytest.raises(RecipeError, match="no causal language model"):
        open_causal_folder(source)
    config.write_text(text.replace('"n_layer": 2', '"n_layer": 3'), "utf-8")
    with pytest.raises(InputError, match=r"has no tensor transformer\.h\.2"):
        open_folder(source).load()
    config.write_text(text, "utf-8")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot open it"):
        open_folder(source).load()
    weights.unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        open_folder(source)


def test_data_that_does_not_fit(source: Path) -> None:
    folder = open_folder(source)
    with pytest.raises(RecipeError, match="vocabulary of 64 and the data 65"):
        folder.check_data(65, 16)
    with pytest.raises(RecipeError, match="above the 32 positions"):
        folder.check_data(64, 33)
