"""Runs of a hybrid: its checkpoints go on on any other layout, and its evaluation reads one chain of tokens a row."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.quantize import quantize
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.training.checkpoint.checkpoint import load_model, step_folder
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import build_mesh
from tests.support.training_runs import BATCH, MODEL, new_run

OPTIONS = {"head_width": 8, "state": 4, "groups": 2, "chunk": 8}
HYBRID = ModelConfig(
    **MODEL.model_dump(include={"width", "heads", "kv_heads", "sequence_length"}),
    layers=5,
    pattern="M-*MT",
    mlp="gelu",
    mixers={"mamba2": OPTIONS, "tcnca": {"kernel": 3, "blocks": 2, "chunk": 4}},
)
STEPS = 6
RUN: dict[str, Any] = {
    "model": HYBRID,
    "tokens": STEPS * BATCH * MODEL.sequence_length,
    "precision": "fp64",
    "monitoring": {"trackers": []},
    "validation": {"every": 0},
}
CHAIN = [
    ({"tensor": 2}, 2),
    ({"pipeline": 2, "pipeline_schedule": "zbv", "micro_batch": 1}, 3),
    ({"data": 2}, 4),
    ({"context": 2}, 5),
    ({}, STEPS),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    new_run(folder, **RUN).train()
    return step_folder(folder / "checkpoints", STEPS)


def run_until(folder: str, layout: dict[str, Any], step: int) -> None:
    settings = TrainConfig(tokens=1, batch_tokens=1, layout=layout).layout
    mesh = build_mesh(settings, HYBRID.num_kv_heads, torch.device("cpu"))
    run = new_run(Path(folder), mesh, layout=layout, **RUN)
    run._resume()
    while run.trainer.progress.step < step:
        run.trainer.step()
    run._save_if_due(True)


def test_a_checkpoint_goes_on_on_any_other_layout(pool: Any, checkpoint: Path, tmp_path: Path) -> None:
    for layout, step in CHAIN:
        world_size = TrainConfig(tokens=1, batch_tokens=1, layout=layout).layout.world_size
        pool.run(world_size, run_until, str(tmp_path), layout, step)
    expected, _ = load_model(checkpoint, "cpu", torch.float64)
    found, _ = load_model(step_folder(tmp_path / "checkpoints", STEPS), "cpu", torch.float64)
    for name, value in found.named_parameters():
        torch.testing.assert_close(value, dict(expected.named_parameters())[name], rtol=1e-10, atol=1e-12)


def saved(checkpoint: Path) -> Transformer:
    return load_model(checkpoint, "cpu", torch.float64)[0]


def test_requests_that_share_a_prefix_are_scored_apart(checkpoint: Path) -> None:
    """Equal to a pass over each request alone; a tree of them could not be read by a recurrence."""
    model = LocalCausalLM(saved(checkpoint), HYBRID.sequence_length)
    requests = [Request((1, 2, 3, 4), (5, 6)), Request((1, 2, 3, 4), (7,)), Request((1, 2, 3, 4), (5, 8, 9))]
    for request, found in zip(requests, score(model, requests, 4096), strict=True):
        tokens = torch.tensor([request.context + request.continuation])
        log_probs = model.head(model.hidden(tokens[:, :-1])[0]).log_softmax(dim=-1)
        places = range(len(request.context) - 1, tokens.shape[1] - 1)
        expected = sum(log_probs[place, tokens[0, place + 1]].item() for place in places)
        assert found.logprob == pytest.approx(expected, rel=1e-10)


class Digits:
    end_of_document = 49
    ends = (49,)

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_generation_is_the_argmax_of_whole_passes(checkpoint: Path) -> None:
    """Also of prompts of unequal length in one batch, which are padded."""
    model = LocalCausalLM(saved(checkpoint), HYBRID.sequence_length)
    prompts = [[1, 5, 26], [7, 36, 31, 5, 27], [2]]
    for prompt, found in zip(prompts, generate(model, Digits(), prompts, GenerationSettings(6)), strict=True):
        tokens = list(prompt)
        for token in found.tokens:
            assert int(model.head(model.hidden(torch.tensor([tokens]))[0, -1:]).argmax()) == token
            tokens.append(token)
        assert len(found.tokens) == 6 or found.ended == "document"


def test_what_is_declared_fp32_stays_so_in_bf16(checkpoint: Path) -> None:
    exact, half = saved(checkpoint), load_model(checkpoint, "cpu", torch.bfloat16)[0]
    dtypes = {name: parameter.dtype for name, parameter in half.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {f"layers.{index}.mixer.scan.{leaf}" for index in (0, 3) for leaf in ("A_log", "D", "dt_bias")}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    name = "layers.3.mixer.scan.A_log"
    assert torch.equal(half.get_parameter(name), exact.get_parameter(name).float())
    tokens = torch.arange(16).unsqueeze(0)
    error = (half(tokens).double() - exact(tokens)).norm() / exact(tokens).norm()
    assert 0 < error < 0.02


def test_int8_weights_keep_the_logits(checkpoint: Path) -> None:
    model, tokens = saved(checkpoint), torch.arange(16).unsqueeze(0)
    before = model(tokens).detach()
    quantize(model, "int8", 0)
    after = model(tokens).detach()
    error = (after - before).norm() / before.norm()
    assert 0 < error < 0.05
