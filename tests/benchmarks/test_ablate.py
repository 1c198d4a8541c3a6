"""The program that proves `gristmill ablate` runs on what curation writes today."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_small_repetition_ends_with_a_table(tmp_path, shared_data):
    shared_data("corpora/books_xhtml.jsonl.zst")
    command = [sys.executable, "benchmarks/ablate.py", "--folder", tmp_path, "--repetitions", 1, "--flops", 2e10]
    command += ["--documents", 200, "--equal", 1, "--controls", "words,repeated-3", "--seeds", 3]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-500:]
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["control"] for result in results] == ["equal", "words", "repeated-3"]
    assert all(f"| {result['control']} | 1 |" in done.stdout for result in results)
