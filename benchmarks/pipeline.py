"""Seconds and MB/s of each stage of the demo, run from nothing in a fresh work folder.

There is no peer: no maintained system runs these stages in one piece. MB are 10^6 bytes of what the stage read: raw
files for curate, curated text for tokenizer and index, tokens (two bytes each) for train."""

import json
import tempfile
from pathlib import Path

from measure import Figure, arguments, print_figures

from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import load_recipe
from gristmill.pipelines.runner import TIMES_NAME, Processes, Runner
from gristmill.pipelines.stage_list import STAGES

QUICK = ["train.tokens=200k", "evaluate.cloze_items=40", "evaluate.text_bytes=20000"]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    overrides = QUICK if options.quick else []
    if options.data:
        overrides = [*overrides, f"sources.0.paths=[{options.data}]"]
    recipe = load_recipe(options.recipe, overrides)
    with tempfile.TemporaryDirectory() as name:
        workdir = Path(name)
        reporter = Reporter.to_terminal()
        engine = LocalEngine(options.workers, reporter)
        lock = pin(recipe, workdir, engine)
        Runner(recipe, workdir, STAGES, lock, reporter, Processes(engine)).run()
        lines = (workdir / "logs" / TIMES_NAME).read_text().splitlines()
        seconds = {line["stage"]: line["seconds"] for line in map(json.loads, lines)}
        megabytes = stage_megabytes(workdir)
    figures = [Figure(f"pipeline_{stage}", value, "s") for stage, value in seconds.items()]
    figures += [Figure(f"pipeline_{stage}_rate", megabytes[stage] / seconds[stage], "MB/s") for stage in megabytes]
    figures.append(Figure("pipeline_total", sum(seconds.values()), "s"))
    print_figures(figures)


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
