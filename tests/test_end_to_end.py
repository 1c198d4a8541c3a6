"""All stages on a tiny recipe with real text, and the claims of docs/reproducibility.md."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.foundation.manifest import differences, read_manifest

STAGES = ["curate", "tokenizer", "index", "train", "evaluate", "report"]
RECIPE = """\
name: tiny
seed: 7
sources:
  - {{name: prose, format: text, paths: ["{folder}/[a-m]*.txt"], weight: 0.6, priority: 1}}
  - {{name: more, format: text, paths: ["{folder}/[n-z]*.txt"], weight: 0.4, priority: 2}}
curate: {{splits: {{validation: 0.1, test: 0.15}}}}
tokenizer: {{vocab_size: 512, sample_bytes: 1M}}
model: {{layers: 2, width: 32, heads: 2, kv_heads: 1, sequence_length: 64, init_std: 0.1}}
train:
  tokens: 32768
  batch_tokens: 1024
  precision: fp32
  optimizer: {{learning_rate: 1e-2}}
  validation: {{every: 16, samples: 4}}
  checkpoint: {{every: 8}}
evaluate: {{cloze_items: 20, text_bytes: 20000, num_continuations: 1, continuation_tokens: 8}}
"""


def all_bytes(workdir: Path) -> dict[str, str]:
    """Stage -> its manifest's text, which holds the digest of every output."""
    return {stage: (workdir / stage / "manifest.json").read_text() for stage in STAGES if (workdir / stage).exists()}


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_corpus) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=small_corpus))
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """The work folder after one undisturbed run, in a process of its own."""
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "run", "tiny.yaml", "--workdir", "whole"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--workers", "2"], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place / "whole"


@pytest.fixture(scope="module")
def gristmill(place, launcher):
    """Runs a command in a fork of a process that has imported everything: (exit code, what it printed)."""

    def run(*arguments, cwd=place):
        started = launcher.start(*arguments, cwd=cwd)
        return started.finish(), started.output()

    return run


def test_every_stage_is_whole_and_as_its_manifest_says(whole):
    for stage in STAGES:
        assert differences(whole / stage, read_manifest(whole / stage)) == []


def test_the_results_and_the_path_of_the_report_are_printed(whole, place):
    said = (place / "stdout").read_text()
    assert "cloze" in said and "bits_per_byte" in said and "chance" in said
    assert str(Path("whole/report/report.html")) in said


def test_counts_add_up(whole):
    """read = kept + removed by reason + quarantined, for documents and for each source."""
    for source in json.loads((whole / "curate/counts.json").read_bytes())["sources"].values():
        kept = sum(split["documents"] for split in source["kept"].values())
        removed = sum(rule["documents"] for rule in source["removed"].values())
        quarantined = sum(reason["documents"] for reason in source["quarantined"].values())
        assert source["read"]["documents"] == kept + removed + quarantined > 0


def test_every_duplicate_names_a_document_that_is_kept(whole):
    ledger = pa.concat_tables([pq.read_table(path) for path in sorted((whole / "curate/ledger").glob("*.parquet"))])
    outcomes = dict(zip(ledger.column("doc_id").to_pylist(), ledger.column("outcome").to_pylist(), strict=True))
    named = [doc_id for doc_id in ledger.column("duplicate_of").to_pylist() if doc_id]
    assert {outcomes[doc_id] for doc_id in named} <= {"kept"}


def test_the_model_has_learnt(whole):
    lines = [json.loads(line) for line in (whole / "train/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(6.24, abs=0.3)  # ln 512: an untrained model knows nothing
    assert losses[-1] < losses[0] - 0.5


def test_a_second_run_does_nothing(whole, gristmill):
    before = all_bytes(whole)
    code, said = gristmill("run", "tiny.yaml", "--workdir", "whole")
    assert (code, said.count("complete, skipped")) == (0, len(STAGES)), said
    assert all_bytes(whole) == before


def test_one_worker_gives_the_same_bytes(whole, place, gristmill):
    """Later stages take no workers."""
    code, said = gristmill("run", "tiny.yaml", "--workdir", "one", "--workers", 1, "--to", "index")
    assert code == 0, said
    found, expected = all_bytes(place / "one"), all_bytes(whole)
    assert found == {stage: expected[stage] for stage in ("curate", "tokenizer", "index")}


def test_plan_names_the_changed_field(whole, gristmill):
    _, said = gristmill("plan", "tiny.yaml", "--workdir", "whole", "--set", "train.tokens=40960")
    flat = " ".join(said.split())
    assert "32768 -> 40960" in flat
    assert flat.count("skip") == 3 and flat.count("rebuild") == 3


def test_verify_finds_a_flipped_byte(whole, place, gristmill):
    damaged = place / "damaged"
    shutil.copytree(whole / "curate", damaged)
    victim = next((damaged / "documents/train").glob("*.parquet"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    code, said = gristmill("verify", damaged)
    assert (code, victim.name in said, "Traceback" in said) == (1, True, False), said


def test_reproduce_says_identical(whole, gristmill):
    code, said = gristmill("reproduce", whole / "curate/manifest.json", "--workdir", "again")
    assert (code, "identical" in said) == (0, True), said


def test_reproduce_names_a_raw_file_that_changed(small_corpus, tmp_path, gristmill):
    raw = tmp_path / "corpus"
    raw.mkdir()
    for path in [*small_corpus.glob("a*.txt"), *small_corpus.glob("s*.txt")]:
        shutil.copy(path, raw)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=raw))
    code, said = gristmill("curate", "tiny.yaml", "--workdir", "first", cwd=tmp_path)
    assert code == 0, said
    (raw / "ast.txt").write_text("other words")
    code, said = gristmill("reproduce", "first/curate/manifest.json", "--workdir", "second", cwd=tmp_path)
    assert (code, "ast.txt" in said, "Traceback" in said) == (1, True, False), said


def test_a_stage_is_a_script_too(whole, place):
    done = subprocess.run(
        [sys.executable, "-m", "gristmill.pipelines.stages.curate", "tiny.yaml", "--workdir", "whole"],
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "curate: complete, skipped" in done.stderr


@pytest.mark.slow  # test_launch.py runs torchrun's processes, test_run.py compares the losses of layouts
def test_two_processes_train_the_same_model(whole, place):
    """torchrun, two data-parallel ranks: the loss of every step is that of one process."""
    workdir = place / "two_ranks"
    for earlier in STAGES[:3]:
        shutil.copytree(whole / earlier, workdir / earlier)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gristmill.pipelines.cli.main", "train", "tiny.yaml", "--workdir", str(workdir)]
    done = subprocess.run(
        [*command, "--set", "train.layout.data=2"],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line)["loss"] for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
        for folder in (whole, workdir)
    )
    assert two == pytest.approx(one, rel=1e-4)
