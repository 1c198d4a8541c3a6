"""Digests of what each stage writes for a small fixed corpus, recorded beside the stage's code version.

`python tests/support/golden_outputs.py` records the current ones in tests/support/golden_outputs.json. Tables are
decoded, so another version of pyarrow writes the same digest; losses and scores are rounded, because processors differ
in the last bits."""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from corpora import prose, write_jsonl

from gristmill.data_pipeline.annotate.annotate import ANNOTATE_VERSION
from gristmill.pipelines.stages.stage_list import STAGES

RECORD = Path(__file__).with_suffix(".json")
COMMAND = "python tests/support/golden_outputs.py"
DIGITS = 4  # significant digits of losses and scores: float64 of another processor agrees to more
RECIPE = """\
name: golden
seed: 7
sources:
  - {name: prose, format: text, paths: ["prose/*.txt"], weight: 0.6, priority: 1}
  - {name: web, format: jsonl, paths: ["web.jsonl"], weight: 0.4, priority: 2}
curate: {splits: {validation: 0.1, test: 0.15}}
tokenizer: {vocab_size: 320, sample_bytes: 1M}
model: {layers: 2, width: 32, heads: 2, kv_heads: 1, sequence_length: 64, init_std: 0.1}
train:
  tokens: 8192
  batch_tokens: 1024
  precision: fp64
  optimizer: {learning_rate: 1e-2}
  validation: {every: 4, samples: 4}
evaluate: {cloze_items: 20, text_bytes: 20000, num_continuations: 1, continuation_tokens: 8}
"""


def run(folder: Path) -> Path:
    """The work folder of the recipe after all stages."""
    write_jsonl(folder / "web.jsonl", [{"text": prose(n)} for n in [*range(60), 3]])
    (folder / "prose").mkdir()
    for number in range(100, 130):
        (folder / "prose" / f"{number}.txt").write_text(prose(number, 300))
    (folder / "golden.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "run", "golden.yaml", "--workdir", "work"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--workers", "1"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "work"


def code_versions() -> dict[str, int]:
    """`annotate` is the cached first step of `curate`."""
    return {"annotate": ANNOTATE_VERSION} | {stage.name: stage.code_version for stage in STAGES}


def digests(work: Path) -> dict[str, str]:
    """Stage -> digest of its output."""
    return {
        "annotate": _digest(_tables(work / "cache" / "annotated", lambda path: path.name.partition("-")[0])),
        "curate": _digest(_tables(work / "curate", lambda path: str(path.relative_to(work)))),
        "tokenizer": _digest(_files(work / "tokenizer", "tokenizer.*")),
        "index": _digest(_files(work / "index", "*/*.bin") | _files(work / "index", "*/*.idx")),
        "train": _digest(_rounded([json.loads(line) for line in _lines(work / "train" / "metrics.jsonl")])),
        "evaluate": _digest(_rounded(json.loads((work / "evaluate" / "results.json").read_bytes())["results"])),
        "report": _digest([line for line in _lines(work / "report" / "report.md") if line.startswith("#")]),
    }


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text("utf-8"))


def _tables(folder: Path, name: Any) -> dict[str, Any]:
    return {name(path): pq.read_table(path).to_pylist() for path in sorted(folder.rglob("*.parquet"))}


def _files(folder: Path, pattern: str) -> dict[str, str]:
    paths = sorted(folder.glob(pattern))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_rounded(member) for member in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return value


def _digest(value: Any) -> str:
    assert value, "a stage wrote nothing"
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        versions, current = code_versions(), digests(run(Path(folder)))
    record = {stage: {"code_version": versions[stage], "digest": digest} for stage, digest in sorted(current.items())}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"{RECORD.name}: the outputs of {len(record)} stages are recorded")
