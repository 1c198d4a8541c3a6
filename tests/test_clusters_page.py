"""The scripts of docs/clusters.md can be parsed, and name options and files that exist."""

import re
import subprocess
from pathlib import Path

import yaml

from gristmill.pipelines.recipes.recipe_file import load_recipe

PAGE = (Path(__file__).parent.parent / "docs" / "clusters.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_shell_scripts_parse():
    scripts = blocks("sh")
    assert len(scripts) == 7
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_the_recipe_is_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(*blocks("yaml"))
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    assert recipe.sources[0].paths == ("s3://my-bucket/raw/*.jsonl.zst",)


def test_the_slurm_script_asks_for_what_it_starts():
    (script,) = [one for one in blocks("sh") if "#SBATCH" in one]
    assert script.startswith("#!/bin/bash\n#SBATCH")
    for line in re.findall(r"^#SBATCH (.*)$", script, re.M):
        assert re.fullmatch(r"--[a-z-]+(=\S+)?", line), line
    started = re.findall(r"--nodes=(\S+ - 1\)\)|\d+)", script)
    assert started == ["8", "1", "$((SLURM_NNODES - 1))"]  # the job; the head; the other nodes


def test_the_kuberay_manifest_is_a_cluster_whose_head_runs_no_task():
    (text,) = blocks("yml")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "--engine ray --address auto" in job["spec"]["entrypoint"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    assert len({container["image"] for container in containers}) == 1  # the same versions everywhere
    for group, container in zip(groups, containers, strict=True):
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes == {"shared"}
        assert container["volumeMounts"][0]["mountPath"] == "/shared"
