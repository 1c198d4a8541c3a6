"""Faults of files and of the machine: one sentence that names the place and the fix, and an exit code."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from corpora import prose, write_jsonl
from pydantic import ValidationError
from pydantic_core import SchemaError

from gristmill.data_pipeline.extraction.weights import load_weights
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.evaluation.convert import megatron_lm
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.local import Worker
from gristmill.pipelines.cli import main as cli
from gristmill.pipelines.workdir.publication import read_fields
from gristmill.tokenizers.tokenizer import end_symbol
from gristmill.training.checkpoint.restricted_pickle import load_restricted


@pytest.mark.parametrize("encoding", ["punycode", "idna", "unicode_escape", "raw-unicode-escape", "undefined", "rot13"])
def test_an_encoding_that_no_file_has_is_refused(encoding):
    with pytest.raises(ValidationError, match="unknown encoding"):
        SourceConfig(name="s", format="text", paths=("a",), encoding=encoding)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"[" * 100_000])
def test_a_damaged_tokenizer_config_is_named(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer_config\.json: .*fetch the file again"):
        end_symbol(tmp_path / "tokenizer.json", b"{}")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"{", b'{"holder": "a"}'])
def test_a_damaged_object_of_a_store_is_named(content):
    with pytest.raises(InputError, match=r"^s3://bucket/run/curate\.json: .* run"):
        read_fields("s3://bucket/run/curate.json", content, ("fingerprint",))
    assert read_fields("s3://bucket/run/curate.json", b'{"fingerprint": "f"}', ("fingerprint",)) == {"fingerprint": "f"}


def test_an_encrypted_archive_is_named(tmp_path):
    """The flag of encryption in both headers of an archive that is otherwise whole."""
    path = tmp_path / "weights.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(megatron_lm.ZIPPED_NAME, b"weights")
    content = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + place] |= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"weights\.zip: cannot be read as .*encrypted.*fetch the file again"):
        megatron_lm._load(path)


@pytest.mark.parametrize("kept", [0, 1, 100, 1000, 1_000_000])
def test_a_truncated_pickle_of_weights_is_named(tmp_path, kept):
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"model": {"weight": torch.zeros(300, 300)}}, path)
    content = path.read_bytes()
    path.write_bytes(content[: min(kept, len(content) - 1)])
    with pytest.raises(InputError, match=r"model_optim_rng\.pt: cannot be read .*fetch the file again"):
        load_restricted(path)


@pytest.mark.parametrize("kept", [0, 5, 100, 5000])
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_truncated_weights_of_the_extractor_are_named(tmp_path, kept, suffix):
    path = tmp_path / f"weights.{suffix}"
    with path.open("wb") as file:
        np.save(file, np.zeros(1000)) if suffix == "npy" else np.savez(file, token_weights=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=rf"weights\.{suffix}: not a weights file"):
        load_weights(str(path))


def test_a_work_folder_whose_name_is_no_utf8_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k)} for k in range(3)])
    (tmp_path / "r.yaml").write_text("name: r\nsources: [{name: a, format: jsonl, paths: [a.jsonl]}]\n")
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "curate", "r.yaml", "--workdir", b"w\xe9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"the name is no UTF-8" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "r.yaml"]


@pytest.mark.parametrize("kilobytes", [250_000, 400_000])
def test_a_limit_of_memory_that_no_library_fits_into_is_one_sentence(tmp_path, kilobytes):
    write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k)} for k in range(3)])
    (tmp_path / "r.yaml").write_text("name: r\nsources: [{name: a, format: jsonl, paths: [a.jsonl]}]\n")
    limited = f'ulimit -v {kilobytes}; exec "$0" -m gristmill.pipelines.cli.main curate r.yaml'
    done = subprocess.run(["bash", "-c", limited, sys.executable], cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 1
    assert b"out of memory" in done.stderr.splitlines()[-1]
    assert b"Traceback" not in done.stderr


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path):
    """While curation runs: one sentence that says what is kept, and exit code 143."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k)} for k in range(3)])
    (tmp_path / "r.yaml").write_text("name: r\nsources: [{name: a, format: jsonl, paths: [a.jsonl]}]\n")
    script = (
        "import time, sys\nfrom gristmill.pipelines.cli import main\n"
        "import gristmill.pipelines.stages.curate as stage\n"
        "def waits(*_, **__):\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "stage.curate = waits\n"
        "main.main(['curate', 'r.yaml', '--workdir', 'w', '--workers', '1'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "curate: interrupted; kept: complete stages (none) and the finished files of curate" in said
    assert "Traceback" not in said


def test_ctrl_c_while_a_worker_imports_is_not_its_own(tmp_path, monkeypatch, capfd):
    """The module of the worker waits at its import; the signal comes then, as for a loaded machine."""
    (tmp_path / "slow_module.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'here')!r}).touch()\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker(["slow_module"])
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    os.kill(worker.process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    worker.give(0, json.dumps, {"a": 1})
    assert worker.answer() == '{"a": 1}'
    worker.connection.close()
    worker.process.join(30)
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_has_not_begun_ignores_ctrl_c(capfd):
    """The signal comes while the interpreter of the new process starts: it is blocked from its first instruction."""
    worker = Worker([])
    os.kill(worker.process.pid, signal.SIGINT)
    worker.give(0, json.dumps, [1])
    assert worker.answer() == "[1]"
    worker.connection.close()
    worker.process.join(30)
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # of this process


def test_ctrl_c_while_a_schema_is_built_is_ctrl_c(monkeypatch, capfd):
    """pydantic raises its own SchemaError with the interrupt's name."""

    def interrupted(args):
        raise SchemaError('Error building "literal" validator: KeyboardInterrupt:')

    monkeypatch.setattr(cli.application, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main(["check", "r.yaml"])
    assert end.value.code == 130
    assert capfd.readouterr().err.startswith("gristmill: interrupted; finished work is kept")
