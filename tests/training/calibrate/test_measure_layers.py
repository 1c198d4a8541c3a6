"""What is fitted to measured layers gives their times back."""

import pytest

from gristmill.training.calibrate import measure_layers
from gristmill.training.calibrate.measure_layers import LENGTHS, PASSES, WIDTHS, fit_layers, layer_of, rested_machine
from gristmill.training.planner.block_time import head_products
from gristmill.training.planner.hardware import FLOAT32, Device, Rates

DEVICE = Device(memory_gib=16, memory_tb_per_second=0.04, matmul_tflops=0.2, matmul_efficiency=0.9, multiprocessors=1)
KNOWN = {"flash_forward": 0.3, "flash_backward": 0.2, "flash_extra_keys": 150.0, "kernel_microseconds": 0.0}
EMPTY_SECONDS = {"alone": 1e-5, "stage": 2e-5, "data": 9e-5, "tensor": 7e-5}


def seconds_of(device: Device) -> dict[str, float]:
    """What every work of a calibration takes on a known device."""
    rates, seconds = Rates(rested_machine(device), FLOAT32), {}
    for width in WIDTHS:
        for layers in (1, 3):  # and 1 ms at both ends
            seconds[f"layer {width} {layers}"] = 1e-3 + layers * measure_layers._forecast(device, layer_of(width))
        products = sum(head_products(1024, width, 4096, rates))
        seconds[f"loss {width}"] = products + 1024 * 4096 * device.logit_nanoseconds * 1e-9
    for name, empty in EMPTY_SECONDS.items():
        seconds |= {f"empty {name} {layers}": 1e-4 + PASSES * layers * empty for layers in (1, 5)}
    for length in LENGTHS:
        flops = measure_layers._attention_flops(length)
        ahead = rates.flash(flops, length)
        seconds[f"attention {length}"] = ahead
        seconds[f"attention and back {length}"] = ahead + rates.flash(2.5 * flops, length, backward=True)
    return seconds


@pytest.mark.parametrize("efficiency", [0.1, 0.5])
def test_a_known_device_is_found_again_from_its_times(efficiency):
    measured = {"layer_microseconds": 10.0, "memory_efficiency": efficiency, "logit_nanoseconds": 2.5}
    truth = DEVICE.model_copy(update=KNOWN | measured)
    start = DEVICE.model_copy(update={"kernel_microseconds": 0.0})
    fitted = fit_layers(start, seconds_of(truth), processes=1, latency=0.0)
    assert fitted.memory_efficiency == pytest.approx(efficiency, rel=1e-3)
    for name in (*KNOWN, "layer_microseconds", "logit_nanoseconds"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-3), name


def test_of_two_processes_the_latencies_that_the_forecast_counts_are_left_out():
    """5 us each: of the 70 us between an empty layer under FSDP over two and over one, two gathers; of the tensor
    axis's 50, four pairs of collectives."""
    truth = DEVICE.model_copy(update=KNOWN | {"layer_microseconds": 10.0, "logit_nanoseconds": 2.5})
    fitted = fit_layers(DEVICE, seconds_of(truth), processes=2, latency=5e-6)
    assert fitted.layer_microseconds == pytest.approx(20)
    assert fitted.data_layer_microseconds == pytest.approx(60)
    assert fitted.tensor_layer_microseconds == pytest.approx(30)
