"""What is fitted to measured layers gives their times back."""

import pytest
import torch

from gristmill.training import measure_layers
from gristmill.training.measure_layers import fit_layers
from gristmill.training.planner.hardware import Device

DEVICE = Device(memory_gib=16, memory_tb_per_second=0.04, matmul_tflops=0.2, matmul_efficiency=0.9, multiprocessors=1)


@pytest.mark.parametrize("efficiency", [0.1, 0.5])
def test_the_share_of_a_copys_bandwidth_is_found_again_from_times_of_layers(monkeypatch, efficiency):
    known = {"flash_forward": 0.3, "flash_backward": 0.2, "layer_microseconds": 10.0, "memory_efficiency": efficiency}
    truth = DEVICE.model_copy(update=known)
    monkeypatch.setattr(measure_layers, "_attention_shares", lambda device, repeats: (0.3, 0.2))
    monkeypatch.setattr(measure_layers, "measure_empty_layer", lambda repeats, axes: 1e-5)
    monkeypatch.setattr(measure_layers, "_layer_seconds", lambda model, *_: measure_layers._forecast(truth, model))
    fitted = fit_layers(DEVICE, repeats=1, processes=1, latency=0.0)
    assert fitted.memory_efficiency == pytest.approx(efficiency, rel=1e-3)
    assert fitted.layer_microseconds == pytest.approx(10)
    assert (fitted.flash_forward, fitted.flash_backward) == (0.3, 0.2)


def test_attention_reaches_a_share_of_the_peak():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        forward, backward = measure_layers._attention_shares(DEVICE, repeats=1)
    finally:
        torch.set_num_threads(threads)
    assert 0 < forward <= 1 and 0 < backward <= 1
