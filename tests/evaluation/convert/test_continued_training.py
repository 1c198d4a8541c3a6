"""Training goes on from models of other families, on layouts as in one process, and the result leaves as it came."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.evaluation.convert.huggingface import family_for, read_huggingface, write_huggingface
from gristmill.training.checkpoint.checkpoint import CheckpointContent, load_model, save, saved_tensors, step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.parallel.mesh import build_mesh, single_process
from tests.support.huggingface_shapes import LLAMA_SHAPE
from tests.support.training_runs import BATCH, MODEL, Counting, new_run

transformers = pytest.importorskip("transformers")
huggingface_models = pytest.importorskip("tests.support.huggingface_models")

SHAPE = LLAMA_SHAPE | {
    "vocab_size": Counting.vocab_size,
    "num_hidden_layers": 4,
    "max_position_embeddings": MODEL.sequence_length,
}
CONFIGS = {
    "gemma2": transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=7, attn_logit_softcapping=3.0),
    "phi": transformers.PhiConfig(**SHAPE),
    "deepseek": transformers.DeepseekV3Config(
        **(SHAPE | {"num_key_value_heads": 4}),
        kv_lora_rank=10,
        q_lora_rank=6,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
}
LAYOUTS = [{"tensor": 2, "micro_batch": 2}, {"data": 2, "pipeline": 2, "micro_batch": 1}]
STEPS = 4
SETTINGS = {
    "precision": "fp64",
    "tokens": STEPS * BATCH * MODEL.sequence_length,
    "checkpoint": {"every": STEPS},
}


def train_on_mesh(folder: Path, config: ModelConfig, layout: dict[str, Any], start: str) -> None:
    mesh = build_mesh(LayoutConfig(**layout), config.num_kv_heads, torch.device("cpu"), config.has_experts)
    new_run(folder, mesh, model=config, layout=layout, init_from=start, **SETTINGS).train()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_training_goes_on_alike_on_two_layouts_and_alone(name: str, tmp_path: Path, pool: Any) -> None:
    theirs = huggingface_models.random_model(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    model, saved_config = read_huggingface(tmp_path / "theirs")
    tensors = saved_tensors(dict(model.named_parameters()), saved_buffers(model))
    save(tmp_path / "imported", 0, CheckpointContent(tensors, saved_config), single_process())
    start, config = str(step_folder(tmp_path / "imported", 0)), model.config
    new_run(tmp_path / "alone", model=config, init_from=start, **SETTINGS).train()
    expected = read_metrics(tmp_path / "alone" / METRICS_NAME)
    assert len(expected) == STEPS and expected[-1]["loss"] < expected[0]["loss"]
    for number, layout in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        pool.run(LayoutConfig(**layout).world_size, train_on_mesh, folder, config, layout, start)
        for one, other in zip(expected, read_metrics(folder / METRICS_NAME), strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
        trained, _ = load_model(step_folder(folder / "checkpoints", STEPS))
        family = family_for(config, type(theirs).__name__)
        write_huggingface(folder / "out", trained, 0, family=family)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
        tokens = torch.arange(12).unsqueeze(0)
        with torch.inference_mode():
            torch.testing.assert_close(reloaded(tokens).logits, trained(tokens), rtol=0, atol=1e-5)
