"""The GPU half of benchmarks/memory.py on a CPU, with small models: what it computes, not how fast."""

import memory
import pytest
import torch
from support import longest_sequence, offload_strategies
from support.longest_sequence import longest
from support.offload_strategies import StepTimes, compared
from support.training_step import if_it_fits

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.hardware import load_hardware

CPU = torch.device("cpu")
ROOM = 2e-5  # GiB of host memory, by which the planner swaps 37 % of 64 tokens and 21 % of 96


@pytest.fixture
def profile(tmp_path):
    """An H100 beside a host that keeps little: the planner swaps a part of the tokens."""
    path = tmp_path / "machine.yaml"
    path.write_text(load_hardware("h100").model_copy(update={"host_memory_gib_per_gpu": ROOM}).model_dump_json())
    return path


@pytest.mark.parametrize("most", [0, 1, 4, 7, 8, 11, 16, 40, 63])
def test_the_longest_that_fits_is_found(most):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= most

    assert longest(fits, start=4, limit=40, unit=1) == min(most, 40)
    assert max(tried) <= 40 and len(set(tried)) == len(tried)


def test_only_a_lack_of_memory_means_that_it_does_not_fit():
    def run(error):
        def raises():
            raise error

        return raises

    assert if_it_fits(lambda: 2.5, CPU) == 2.5
    assert if_it_fits(run(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), CPU) is None
    assert if_it_fits(run(RuntimeError("CUDA error: out of memory")), CPU) is None
    with pytest.raises(RuntimeError, match="shape"):
        if_it_fits(run(RuntimeError("shape mismatch")), CPU)


def test_each_policy_has_its_rates_and_its_longest_sequence(profile, monkeypatch, capsys):
    """Host memory for 64 tokens of a full swap, which is enough for 96 of which a share is swapped."""
    bench = longest_sequence.PolicyBench(
        ModelConfig(layers=3, width=16, heads=2, sequence_length=32), 64, CPU, profile, "fp32", rounds=1
    )
    room = bench.host_bytes(bench.train("swap", 64), 64)
    monkeypatch.setattr(longest_sequence, "available_bytes", lambda: room)
    figures = {each.figure: each for each in longest_sequence.length_figures(bench, (64,), limit=96, unit=32)}
    rate = figures["memory_full_64_tokens"].ours
    for policy in ("swap", "tokens"):
        each = figures[f"memory_{policy}_64_tokens"]
        assert (each.peer, each.ratio) == (rate, each.ours / rate)
    assert figures["memory_swap_longest"].ours == 64
    assert figures["memory_full_longest"].ours == 96
    assert bench.train("tokens", 64).layout.offloaded_token_fraction == pytest.approx(0.37, abs=0.005)
    assert figures["memory_tokens_longest"].ours == 96
    assert "96 tokens fit (the search ends there)" in capsys.readouterr().out


def test_strategies_and_fsdp_train_the_same_model(profile):
    model = ModelConfig(layers=2, width=32, heads=2, sequence_length=16)
    bench = offload_strategies.StrategyBench(
        model, 64, CPU, profile, "fp32", samples=2, subgroup_parameters=4096, rounds=2
    )
    times, chosen = offload_strategies.measured_steps(bench)
    assert {"none", "cpu", "static_half", "stride_1", "stride_2"} < times.keys() and chosen in times
    plain = times["none"].losses
    assert plain[0] > plain[1] > plain[2]
    assert all(each.losses == plain for each in times.values())
    assert all(each.measured > 0 and each.forecast > 0 for each in times.values())
    seconds, losses = offload_strategies.peer_seconds(bench)
    assert seconds > 0
    assert losses == pytest.approx(plain, rel=1e-6)


def test_figures_of_strategies_by_hand():
    """Forecasts of 2.2, 1.1 and 0.9 seconds of 2, 1 and 1: the largest error is 10 %."""
    seconds = {"cpu": (2.0, 2.2), "stride_1": (1.25, 1.25), "stride_2": (1.0, 0.9)}
    times = {name: StepTimes(*each, (1.0,)) for name, each in seconds.items()}
    figures = {each.figure: each for each in compared(times, "stride_1", 5.0, 4000)}
    assert figures["offload_step_stride_2"].ratio == 2
    assert figures["offload_forecast_error"].ours == pytest.approx(10)
    assert (figures["offload_chosen_stride"].peer_name, figures["offload_chosen_stride"].ratio) == (
        "the fastest, stride_2",
        0.8,
    )
    against = figures["offload_against_fsdp2"]
    assert (against.ours, against.peer, against.ratio) == (3200, 800, 4)


@pytest.mark.slow
def test_the_half_for_gpus_gives_every_figure():
    found = list(memory.gpu_figures(CPU, memory.TINY, None, ("lengths", "offload")))
    policies = [f"memory_{policy}_{what}" for policy in ("full", "swap", "tokens") for what in ("64_tokens", "longest")]
    steps = [f"offload_step_{name}" for name in ("none", "cpu", "static_half", "stride_1", "stride_2")]
    rest = ["offload_forecast_error", "offload_chosen_stride", "offload_against_fsdp2"]
    assert {*policies, *steps, *rest} <= {each.figure for each in found}
    assert all(each.ours > 0 for each in found)
