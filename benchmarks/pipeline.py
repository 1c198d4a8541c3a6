"""Seconds and MB/s of each stage of the demo, run from nothing in a fresh work folder.

There is no peer: no maintained system runs these stages in one piece. MB are 10^6 bytes of what the stage read: raw
files for curate, curated text for tokenizer and index, tokens (two bytes each) for train.

`--engines MEGABYTES` instead curates so many MB of made English text by `gristmill run --to curate`, start-up included,
on the local engine and on a Ray cluster of one node with as many processors, in turn: `ray_overhead` is the share by
which Ray is slower (0.1 was asked for at 1000 MB), and the corpora must have the same bytes."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import Figure, arguments, print_figures
from support.curation_inputs import made_texts, paragraphs, write_jsonl
from support.curation_runs import Run, recipe, run_gristmill

from gristmill.foundation.manifest import read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.runner import TIMES_NAME, RunContext, Runner
from gristmill.pipelines.stages.stage_list import STAGES
from gristmill.pipelines.workdir.raw_files import lock_raw_files

ENGINE_ROUNDS = 2
QUICK = ["train.tokens=200k", "evaluate.cloze_items=40", "evaluate.text_bytes=20000"]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engines", type=float, metavar="MEGABYTES", help="compare the engines")
    options = parser.parse_args()
    if options.engines:
        return print_figures(compare_engines(options.engines, options.workers, options.data))
    overrides = QUICK if options.quick else []
    if options.data:
        overrides = [*overrides, f"sources.0.paths=[{options.data}]"]
    loaded = load_recipe(options.recipe, overrides)
    with tempfile.TemporaryDirectory() as name:
        workdir = Path(name)
        reporter = Reporter.to_terminal()
        engine = LocalEngine(options.workers, reporter)
        lock = lock_raw_files(loaded, workdir, engine)
        Runner(loaded, workdir, STAGES, lock, reporter, RunContext(engine)).run()
        lines = (workdir / "logs" / TIMES_NAME).read_text().splitlines()
        seconds = {line["stage"]: line["seconds"] for line in map(json.loads, lines)}
        megabytes = stage_megabytes(workdir)
    figures = [Figure(f"pipeline_{stage}", value, "s") for stage, value in seconds.items()]
    figures += [Figure(f"pipeline_{stage}_rate", megabytes[stage] / seconds[stage], "MB/s") for stage in megabytes]
    figures.append(Figure("pipeline_total", sum(seconds.values()), "s"))
    print_figures(figures)


def compare_engines(megabytes: float, workers: int, data: Path | None) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name, ray_node(workers) as address:
        folder = Path(name)
        (folder / "raw").mkdir()
        write_jsonl(folder / "raw", list(made_texts(paragraphs(data), int(megabytes * 1e6), 4000)))
        settings = recipe(folder / "raw", "jsonl", None, ("en",), True)
        engines: dict[str, tuple[str, ...]] = {"local": (), "ray": ("--engine", "ray", "--address", address)}
        runs: dict[str, list[Run]] = {each: [] for each in engines}
        for _ in range(ENGINE_ROUNDS):
            for each, chosen in engines.items():
                runs[each].append(run_gristmill(settings, folder / each, workers, chosen))
        outputs = [read_manifest(folder / each / "run" / "curate").outputs for each in engines]
        if outputs[0] != outputs[1]:
            sys.exit("the engines gave different corpora")
    local, ray = (statistics.median(run.seconds for run in runs[each]) for each in engines)
    return [
        Figure("ray_overhead", ray / local - 1, "share", peer=0.1, peer_name="most that was asked for, at 1 GB"),
        Figure("engine_local_seconds", local, "s"),
        Figure("engine_ray_seconds", ray, "s"),
    ]


@contextmanager
def ray_node(workers: int) -> Iterator[str]:
    """The address of a new Ray cluster on this machine: a head without processors and one node.

    Ray starts workers with niceness 15, which counts where other processes of the machine are busy."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    store_bytes = 80 << 20
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": store_bytes}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=workers, object_store_memory=store_bytes)
        yield cluster.address
    finally:
        cluster.shutdown()


def stage_megabytes(workdir: Path) -> dict[str, float]:
    counts = json.loads((workdir / "curate/counts.json").read_bytes())["sources"].values()
    raw = json.loads((workdir / "lock.json").read_bytes())["sources"]
    raw_bytes = sum(file["bytes"] for source in raw for file in source["files"])
    kept_bytes = sum(split["bytes"] for source in counts for split in source["kept"].values())
    lines = (workdir / "train/metrics.jsonl").read_text().splitlines()
    tokens = max(json.loads(line).get("tokens", 0) for line in lines)
    return {
        "curate": raw_bytes / 1e6,
        "tokenizer": kept_bytes / 1e6,
        "index": kept_bytes / 1e6,
        "train": 2 * tokens / 1e6,
    }


if __name__ == "__main__":
    main()
