import pytest
import torch
import yaml

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import RecipeError
from gristmill.training import measure
from gristmill.training.measure import CUDA_SHAPES, Measured, calibrate, fit_device, fit_error
from gristmill.training.planner.hardware import load_hardware
from gristmill.training.planner.rates import Rates, Sustained


def test_a_known_device_is_found_again_from_its_own_times():
    """Points made by the H100 profile: the fit foretells them within 3 %."""
    machine = load_hardware("h100")
    rates = Rates(machine, Sustained())
    points = [Measured(*shape, rates.matmul(*shape)) for shape in CUDA_SHAPES]
    fitted = fit_device(points, copy=3.0e12, device=torch.device("cpu"), base=machine)
    assert fit_error(fitted, points) < 0.03
    assert fitted.matmul_tflops == machine.device.matmul_tflops
    assert fitted.memory_efficiency == pytest.approx(3.0 / 3.35)


def test_this_machine_is_measured_and_its_profile_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CPU_SHAPES", ((64, 64, 64), (128, 128, 128), (256, 64, 256)))
    monkeypatch.setattr(measure, "measure_copy", lambda device, repeats: 10e9)
    path = tmp_path / "machine.yaml"
    calibrate(path, None, Reporter.silent(), repeats=1)
    profile = load_hardware(path)
    assert profile.device.memory_tb_per_second == pytest.approx(0.01)
    assert "measured" in yaml.safe_load(path.read_text())["sources"]["matmul"]


def test_a_profile_is_a_yaml_file(tmp_path):
    with pytest.raises(RecipeError, match=r"a hardware profile is a \.yaml file"):
        calibrate(tmp_path / "machine.json", None, Reporter.silent())
