"""Commands and worker processes import only what they run."""

import json
import subprocess
import sys

import pytest

# Libraries that curation of plain text does without. scipy itself comes with numba, scipy.linalg does not.
UNUSED = (
    "datasets",
    "duckdb",
    "fsspec",
    "gigatoken",
    "lm_eval",
    "lxml",
    "matplotlib",
    "numba",
    "pandas",
    "pydivsufsort",
    "scipy.linalg",
    "sentencepiece",
    "sklearn",
    "tiktoken",
    "tokenizers",
    "torch",
    "trafilatura",
    "transformers",
    "gristmill.tokenizers.tokenizer",
    "gristmill.training.planner.command",
)
PROGRAM = """
import sys
from gristmill.pipelines.cli.main import main

try:
    main(["run", "recipe.yaml", "--to", "curate", "--workers", "1", "--workdir", "work"])
finally:
    print(*sorted(sys.modules))
"""
RECIPE = """
name: small
sources: [{name: lines, paths: [lines.jsonl], format: jsonl}]
curate: {languages: [en], filters: [], near_dedup: {}}
"""
WORKER = """
import importlib, sys
importlib.import_module("gristmill.data_pipeline.annotate.annotate")
importlib.import_module("gristmill.data_pipeline.dedup.near")
print(*sorted(sys.modules))
"""


@pytest.fixture
def small_recipe(tmp_path):
    sentence = "The quick brown fox number {0} jumps over lazy dog {1} while it rains in valley {2}."
    texts = ["\n".join(sentence.format(i, 7 * i + j, j) for j in range(8)) for i in range(4)]
    lines = [json.dumps({"id": str(i), "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def modules_after(program, folder):
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_curation_of_plain_text_imports_what_it_runs(small_recipe):
    loaded = modules_after(PROGRAM, small_recipe)
    if "numba" in loaded:  # it has compiled kernels, which the next run reads
        (small_recipe / "work").rename(small_recipe / "first")
        loaded = modules_after(PROGRAM, small_recipe)
    assert "gristmill.data_pipeline.run_curation" in loaded
    assert sorted(loaded & set(UNUSED)) == []


def test_a_worker_imports_what_its_tasks_run(tmp_path):
    assert sorted(modules_after(WORKER, tmp_path) & {*UNUSED, "typer", "gristmill.pipelines.cli.main"}) == []


def test_the_command_line_imports_no_command_before_it_is_called(tmp_path):
    loaded = modules_after("import sys, gristmill.pipelines.cli.main; print(*sys.modules)", tmp_path)
    of_commands = {name for name in loaded if name.startswith("gristmill.pipelines.cli.")}
    assert of_commands == {"gristmill.pipelines.cli.main"}
    assert sorted(loaded & {"numba", "numpy", "pyarrow", "pydantic"}) == []
