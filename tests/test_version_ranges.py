"""Other versions of the libraries whose internals we are close to: the quick tests pass with the oldest version of the
range in pyproject.toml, and with the newest that there was.

Each case is an environment that borrows all libraries from the one that runs the tests, with one installed anew; torch
with the CUDA libraries that it does not start without (5 GB)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = "tests/pipelines/test_golden_outputs.py"  # every stage, byte for byte
KERNELS = (GOLDEN, "tests/data_pipeline/dedup", "tests/foundation/runtime/kernels")
RECIPES = (GOLDEN, "tests/pipelines/recipes")
# pyarrow writes its version into Parquet files, so the recorded bytes are those of the pinned one.
TABLES = ("tests/data_pipeline/readers", "tests/data_pipeline/corpus")
MODELS = ("tests/evaluation/convert/test_huggingface.py", "tests/tokenizers/test_export.py")
# Where we are close to torch: hooks of saved tensors, compiled and fused losses, FSDP, checkpoints.
ENGINE = (
    "tests/training/model/test_transformer.py",
    "tests/training/model/test_layer_hook.py",
    "tests/training/model/test_loss.py",
    "tests/training/checkpoint/test_checkpoint.py",
    "tests/training/optim/test_optimizer.py",
    "tests/training/parallel/test_fsdp.py",
)
CASES = {
    "numba 0.64": (("numba==0.64.0", "llvmlite==0.46.0"), KERNELS),
    "numba 0.67": (("numba==0.67.0", "llvmlite==0.49.0"), KERNELS),
    "pyarrow 22": (("pyarrow==22.0.0",), TABLES),
    "pydantic 2.12": (("pydantic==2.12.0", "pydantic_core==2.41.1"), RECIPES),
    "pydantic 2.14.4": (("pydantic==2.14.4", "pydantic_core==2.50.5"), RECIPES),
    "torch 2.11": (("torch==2.11.0",), ENGINE),
    "torch 2.14.1": (("torch==2.14.1",), ENGINE),
    "transformers 5.12": (("transformers==5.12.0",), MODELS),
    "transformers 5.24": (("transformers==5.24.0",), MODELS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_quick_tests_pass_with_this_version(case, tmp_path):
    requirements, tests = CASES[case]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    (own,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (own / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    install = [python, "-m", "pip", "install", "-q"]
    alone = [] if case.startswith("torch") else ["--no-deps"]
    subprocess.run([*install, *alone, *requirements], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:]
