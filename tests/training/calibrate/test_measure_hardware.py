"""MeasuredProduct profiles, and fits to synthetic measurements."""

import pytest
import torch
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.startup import host_bytes
from gristmill.training.calibrate import measure_hardware as measure
from gristmill.training.calibrate import measure_layers as layers
from gristmill.training.calibrate.links import Sent, fit_link
from gristmill.training.calibrate.measure_hardware import (
    CUDA_SHAPES,
    MeasuredProduct,
    fit_device,
    pattern_search,
    write_profile,
)
from gristmill.training.planner.hardware import GIB, Rates, Sustained, load_hardware


def test_a_known_device_is_recovered_from_its_times():
    """Points computed from the H100 profile: the fit predicts them within 3 %."""
    machine = load_hardware("h100")
    rates = Rates(machine, Sustained())
    points = [MeasuredProduct(*shape, rates.matmul(*shape)) for shape in CUDA_SHAPES]
    fitted = fit_device(points, copy=3.0e12, device=torch.device("cpu"), base=machine)
    short_run = fitted.model_copy(update={"sustained": 1.0})  # the fit is to short measurements
    refitted = Rates(machine.model_copy(update={"device": short_run}), Sustained())
    errors = [abs(refitted.matmul(p.rows, p.depth, p.columns) / p.seconds - 1) for p in points]
    assert sum(errors) / len(errors) < 0.03
    assert fitted.matmul_tflops == machine.device.matmul_tflops
    assert fitted.memory_efficiency == pytest.approx(3.0 / 3.35)


def test_this_machine_is_measured_and_its_profile_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CPU_SHAPES", ((64, 64, 64), (128, 128, 128), (256, 64, 256)))
    monkeypatch.setattr(measure, "_copied_bytes", lambda device: 2**20)
    monkeypatch.setattr(layers, "WIDTHS", (64, 128))
    path = tmp_path / "machine.yaml"
    write_profile(path, None, Reporter.silent(), repeats=1)
    profile = load_hardware(path)
    assert profile.device.memory_tb_per_second > 0 and profile.device.logit_nanoseconds >= 0
    assert 0 < profile.device.flash_forward <= 1 and 0 < profile.device.flash_backward <= 1
    assert "measured" in yaml.safe_load(path.read_text())["sources"]["matmul"]
    assert "while another thread copies" in profile.sources["host_update"]
    assert profile.host_update_gparams_per_second > 0 and profile.host_contention >= 0
    assert profile.host_link.kind == "memory"
    assert f"{profile.host_link.gb_per_second:.1f} GB/s" in profile.sources["host_link"]
    assert profile.host_memory_gib_per_gpu * GIB == pytest.approx(host_bytes())


def test_a_wire_is_found_again_from_its_own_curve():
    """3 us and 20 GB/s over 8 ranks (3 hops); noise of one message moves it little."""
    curve = [Sent(size, 1.75 * size, 3 * 3e-6 + 1.75 * size / 20e9) for size in (4096, 32768, 2**20, 2**25)]
    link = fit_link(curve, "nvlink", hops=3)
    assert link.gb_per_second == pytest.approx(20)
    assert link.latency_microseconds == pytest.approx(3)
    noisy = [curve[0], curve[1]._replace(seconds=curve[1].seconds * 1.1), *curve[2:]]
    assert fit_link(noisy, "nvlink", hops=3).gb_per_second == pytest.approx(20, rel=0.05)
    falling = [Sent(4096, 4096.0, 1e-3), Sent(8192, 8192.0, 1e-4)]
    assert fit_link(falling, "nvlink", 1).gb_per_second > 0


def wire_of_two():
    profile = measure.measure(torch.device("cpu"), None, Reporter.silent(), repeats=1)
    return profile.node_link.gb_per_second, profile.sources["node_link"]


@pytest.mark.slow  # measures the whole machine on each rank
def test_two_processes_measure_the_curve_of_their_wire(pool):
    first, second = pool.run(2, wire_of_two)
    assert first[0] > 0 and second[0] > 0
    assert "measured all-gather and reduce-scatter of 2 ranks: 4096 B" in first[1] and "sends: 4096 B" in first[1]


def test_a_profile_is_a_yaml_file_in_a_folder_that_exists(tmp_path):
    with pytest.raises(RecipeError, match="no such folder"):
        write_profile(tmp_path / "absent" / "machine.yaml", None, Reporter.silent())
    with pytest.raises(RecipeError, match=r"a hardware profile is a \.yaml file"):
        write_profile(tmp_path / "machine.json", None, Reporter.silent())


def test_another_file_is_not_replaced_by_a_profile(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\n")
    with pytest.raises(RecipeError, match="stands there already and is no hardware profile"):
        write_profile(recipe, None, Reporter.silent())
    assert recipe.read_text() == "name: mine\n"


# Pattern search on functions with known minima.


def test_pattern_search_finds_a_minimum():
    best = pattern_search(lambda p: (p[0] - 0.7) ** 2 + (p[1] - 0.5) ** 2, [0.9, 0.9], 0.1, 1e-4, 0.4, 1.0)
    assert best == pytest.approx([0.7, 0.5], abs=1e-3)
