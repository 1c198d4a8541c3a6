"""A secret that a user writes into an address or keeps in the environment is in nothing that gristmill prints or
writes."""

import json
import secrets
from pathlib import Path

import pytest

from gristmill.pipelines.cli.main import main

FORMS = [
    "https://user:{}@host.example/x.jsonl",
    "simplecache::http://user:{}@host.example/x.jsonl",
    "http://host.example/x.jsonl?api_key={}",
    "https://host.example/x.jsonl#access_token={}",
    "zip://member.jsonl::https://host.example/x.zip?X-Amz-Signature={}",
]
FIELDS = ["sources.0.paths", "tokenizer.path", "train.init_from", "curate.lists.badwords", "evaluate.data"]
RECIPE = """
name: secrets
seed: 1
sources:
  - {name: notes, format: jsonl, paths: [notes.jsonl]}
curate:
  filters: []
  exact_dedup: {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"The note of day {day} says what was seen in the valley."}) for day in range(40)]
    Path("notes.jsonl").write_text("\n".join(lines) + "\n")
    Path("secrets.yaml").write_text(RECIPE)
    return tmp_path


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", FIELDS)
def test_an_address_with_a_secret_is_refused_and_not_repeated(form, field, folder, capfd):
    secret = secrets.token_hex(12)
    address = form.format(secret)
    with pytest.raises(SystemExit) as end:
        main(["curate", "secrets.yaml", "--workdir", "work", "--set", f"{field}=[{address}]"])
    printed = "".join(capfd.readouterr())
    assert end.value.code == 2
    assert "credentials" in printed
    assert field in printed
    assert secret not in printed
    assert secret.encode() not in written(folder)


@pytest.mark.parametrize("option", ["{}", "sources.9.paths={}", "name.part={}", "name=[{}"])
def test_a_malformed_option_is_not_repeated_with_its_secret(option, folder, capfd):
    secret = secrets.token_hex(12)
    with pytest.raises(SystemExit) as end:
        main(["check", "secrets.yaml", "--set", option.format(f"https://user:{secret}@host.example/x")])
    printed = "".join(capfd.readouterr())
    assert end.value.code == 2
    assert "--set" in printed
    assert secret not in printed


def test_secrets_of_the_environment_stay_there(folder, capfd, monkeypatch):
    """Whole: the corpus, manifest, lock, log, and what was printed."""
    values = {}
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "GRISTMILL_TOKEN", "https_proxy"):
        values[name] = secrets.token_hex(12)
        monkeypatch.setenv(name, values[name] if name != "https_proxy" else f"http://user:{values[name]}@127.0.0.1:9")
    with pytest.raises(SystemExit) as end:
        main(["curate", "secrets.yaml", "--workdir", "work", "--workers", "2"])
    printed = "".join(capfd.readouterr())
    assert end.value.code in (None, 0), printed
    content = written(folder / "work")
    assert b"secrets" in content  # the recipe's name: the files were read
    for name, value in values.items():
        assert value not in printed, name
        assert value.encode() not in content, name
