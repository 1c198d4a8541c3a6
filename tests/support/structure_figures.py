"""Figures of docs/architecture.md: files and lines of the package, arrows between rooms, and the files of two journeys.

python tests/support/structure_figures.py [--journeys] prints them; the journeys take half a minute."""

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
MAX_LINES = 450
RECIPE = """\
name: tiny
sources: [{name: prose, format: jsonl, paths: [raw.jsonl]}]
curate: {splits: {validation: 0.1, test: 0.15}}
tokenizer: {vocab_size: 320, sample_bytes: 1M}
model: {layers: 2, width: 32, heads: 2, kv_heads: 1, sequence_length: 64}
train: {tokens: 4096, batch_tokens: 1024, precision: fp32}
"""
# Command -> the function, and its file, whose calls and all below are counted.
WINDOWS = {
    "curate": ("curate", "data_pipeline.run_curation"),
    "index": ("index_corpus", "tokenizers.index_corpus"),
    "train": ("step", "training.trainer"),
}


def lines_by_folder() -> dict[str, list[int]]:
    """By top folder, the lines of each file."""
    from test_structure import LAYERS

    return {
        top: [len(path.read_text("utf-8").splitlines()) for path in (ROOT / top).rglob("*.py")]
        for top in sorted(LAYERS, key=lambda name: LAYERS[name])
    }


def arrows(top: str) -> int:
    from test_structure import folder_graph

    return sum(len(targets) for targets in folder_graph(top).values())


def print_sizes() -> None:
    by_folder = lines_by_folder()
    print("folder files lines median arrows")
    for top, lines in by_folder.items():
        print(top, len(lines), sum(lines), sorted(lines)[len(lines) // 2], arrows(top))
    every = sorted(size for lines in by_folder.values() for size in lines)
    above = [size for size in every if size > MAX_LINES]
    print("all", len(every), sum(every), every[len(every) // 2])
    print(f"largest {every[-1]}, {len(above)} over {MAX_LINES}, {sum(size > 480 for size in every)} over 480")


def write_corpus(folder: Path, documents: int = 300) -> None:
    """Writes raw.jsonl and tiny.yaml: documents of four paragraphs of common English words, and others."""
    draw = random.Random(1)
    words = ["the", "of", "and", "to", "in", "is", "that", "with", "be", "have", *(f"word{n}" for n in range(50))]
    with (folder / "raw.jsonl").open("w") as file:
        for number in range(documents):
            paragraphs = [" ".join(draw.choices(words, k=draw.randint(40, 90))).capitalize() + "." for _ in range(4)]
            file.write(json.dumps({"text": "\n\n".join(paragraphs), "url": f"http://a.org/{number}"}) + "\n")
    (folder / "tiny.yaml").write_text(RECIPE)


def run_counted(window: str, module: str, arguments: list[str]) -> None:
    """Runs a command in this process and prints the files whose functions the window calls, one a line."""
    files: dict[str, None] = {}
    state = {"depth": 0}

    def profile(frame: Any, event: str, _: Any) -> None:
        file = frame.f_globals.get("__name__", "")
        if event not in ("call", "return") or not file.startswith("gristmill."):
            return
        is_window = frame.f_code.co_name == window and file == f"gristmill.{module}"
        state["depth"] += (event == "call") * is_window - (event == "return") * is_window
        if event == "call" and state["depth"] and not frame.f_code.co_name.startswith("<"):
            files.setdefault(file)

    def leave(code: int = 0) -> None:  # the program ends without unwinding; the files must still be printed
        raise SystemExit(code)

    os._exit = leave  # type: ignore[assignment]
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="gristmill")
    run = command.load()
    sys.argv = ["gristmill", *arguments]
    sys.setprofile(profile)
    try:
        run()
    except SystemExit as end:
        assert not end.code, end.code
    finally:
        sys.setprofile(None)
        print("\n".join(["files:", *files]), flush=True)


def print_journeys() -> None:
    """Files of a document from raw file to .bin, and of one training step, in one process."""
    with tempfile.TemporaryDirectory() as name:
        folder, journeys = Path(name), {}
        write_corpus(folder)
        for command in ("curate", "tokenizer", "index", "train"):
            arguments = [command, "tiny.yaml", *([] if command == "train" else ["--workers", "1"])]
            counted = [sys.executable, __file__, "--counted", *WINDOWS.get(command, ("-", "-")), *arguments]
            done = subprocess.run(counted, cwd=folder, capture_output=True, text=True, check=True)
            journeys[command] = set(done.stdout.partition("files:\n")[2].split())
    document = journeys["curate"] | journeys["index"]
    print(f"curate {len(journeys['curate'])} files, index {len(journeys['index'])}, a document {len(document)}")
    print(f"a training step {len(journeys['train'])}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--counted"]:
        run_counted(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        print_sizes()
        if "--journeys" in sys.argv:
            print_journeys()
