"""`gristmill explain` on the logs of a run."""

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner

from gristmill.pipelines.cli.commands import app
from gristmill.pipelines.cli.layout import run_folder
from tests.training.planner.test_explain import CPU, DATA, write_logs


def test_a_table_and_json_name_the_cause(tmp_path: Path) -> None:
    write_logs(tmp_path / "work" / "train", DATA, data=0.2)
    profile = tmp_path / "machine.yaml"
    profile.write_text(yaml.safe_dump(CPU.model_dump(mode="json")))
    command = ["explain", str(tmp_path / "work"), "--hardware", str(profile)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "1. slow loader" in shown.output and "communication, data" in shown.output
    answer = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert answer["named"][0] == "slow loader" and answer["terms"][-1]["name"] == "step"


def test_of_a_work_folder_the_run_under_way_is_explained(tmp_path: Path) -> None:
    write_logs(tmp_path / "train", DATA)
    write_logs(tmp_path / ".train-abc", DATA)
    assert run_folder(tmp_path) == tmp_path / ".train-abc"
    assert run_folder(tmp_path / "train") == tmp_path / "train"
