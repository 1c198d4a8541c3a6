"""The gradient noise scale: worked examples, random gradients of known noise, and the same on every layout."""

import numpy as np
import pytest

from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.objectives.objective import Batches
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.noise_scale import GradientNoise, batch_advice, measurements_of, noise_scale
from gristmill.training.run import RunConfig, build_forward_backward
from gristmill.training.trainer import StepReport, Trainer
from tests.support.forked_pool import ForkedPool
from tests.support.parity import Case, mesh_of_group


def test_two_norms_give_signal_and_noise() -> None:
    noise = GradientNoise.of_norms(2.0, 4, 2.0**0.5, 12)  # 1 + 12 / 4 = 4, 1 + 12 / 12 = 2
    assert (noise.signal, noise.noise) == pytest.approx((1.0, 12.0))
    assert noise_scale([noise] * 5) == pytest.approx(12.0)
    assert noise_scale([noise] * 4) is None and noise_scale([GradientNoise(-1.0, 2.0)] * 9) is None


def test_the_scale_of_gaussian_gradients_is_their_own() -> None:
    """Gradients of 200 numbers, |G|^2 = 2, and a variance of 0.5 a number and token: scale 100 / 2 = 50 tokens."""
    generator, mean = np.random.default_rng(1), np.full(200, 0.1)
    measured = []
    for _ in range(400):
        tokens = mean + generator.normal(scale=0.5**0.5, size=(32, 200))
        small, large = (float(np.linalg.norm(part.mean(axis=0))) for part in (tokens[:8], tokens))
        measured.append(GradientNoise.of_norms(small, 8, large, 32))
    assert noise_scale(measured) == pytest.approx(50, rel=0.1)


def test_a_batch_beyond_the_scale_is_said() -> None:
    lines = [{"step": step} for step in range(3)] + [{"gradient_noise": {"signal": 1.0, "noise": 12.0}}] * 6
    assert len(measurements_of(lines)) == 6
    assert batch_advice(lines, 8) == "gradient noise scale about 12 tokens, batch_tokens 8"
    assert "beyond it" in str(batch_advice(lines, 16)) and batch_advice(lines[:5], 16) is None


def measured_step(case: Case, every: int = 1) -> StepReport:
    model, configured = case.configs
    fields = configured.model_dump(exclude_unset=True) | {"monitoring": {"noise_scale_every": every}}
    train = TrainConfig.model_validate(fields)
    mesh = mesh_of_group(model, train) if train.layout.world_size > 1 else single_process()
    parts = build_local_model(model, case.vocab, train, mesh, seed=7)
    passes = build_forward_backward(parts, RunConfig(model, train, 7), mesh, case.loss)
    optimizer = build_optimizer(parts.parameters, train, model, mesh, parts.stream)
    trainer = Trainer(train, parts, passes, optimizer, Batches(case.samples, mesh.data, mesh.device), mesh)
    trainer.step()
    return trainer.step()


@pytest.mark.parametrize(
    "case",
    [
        Case({"data": 2}),
        Case({"tensor": 2}, "experts"),
        Case({"pipeline": 2, "micro_batch": 4}),
        Case({"data": 2, "offload": {"optimizer": "cpu"}}),
    ],
    ids=str,
)
def test_every_layout_measures_the_same_and_trains_as_without(case: Case, pool: ForkedPool) -> None:
    alone = Case({"pipeline": 1} if case.deep else {"data": 1}, case.model)
    plain = measured_step(alone)
    reports = pool.run(case.configs[1].layout.world_size, measured_step, case)
    assert plain.gradient_noise is not None
    for report in reports:
        assert (report.gradient_noise.signal, report.gradient_noise.noise) == pytest.approx(
            (plain.gradient_noise.signal, plain.gradient_noise.noise), rel=1e-9
        )
        assert report.grad_norm == pytest.approx(plain.grad_norm, rel=1e-12)
    without = measured_step(alone, every=0)
    assert without.gradient_noise is None
    assert (without.grad_norm, without.loss) == (plain.grad_norm, plain.loss)
