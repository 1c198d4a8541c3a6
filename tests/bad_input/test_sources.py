"""Missing and invalid source files: an error before any document is read."""

import gzip
import os

from bad_input import Case, each, small

PNG = b"\x89PNG\r\n\x1a\n" + bytes(24)
KINDS = {
    "PNG": (PNG, "a PNG picture"),
    "JPEG": (b"\xff\xd8\xff\xe0\x00\x10JFIF", "a JPEG picture"),
    "GIF": (b"GIF89a\x01\x00", "a GIF picture"),
    "PDF": (b"%PDF-1.7\n", "a PDF document"),
    "ZIP": (b"PK\x03\x04\x14\x00", "a ZIP archive"),
    "program": (b"\x7fELF\x02\x01\x01", "a program"),
    "database": (b"SQLite format 3\x00", "an SQLite database"),
    "array": (b"\x93NUMPY\x01\x00", "a NumPy array"),
    "film": (b"\x00\x00\x00\x20ftypisom", "an MP4 or HEIC file"),
    "Parquet": (b"PAR1\x15\x04", "a Parquet file"),
}


def source(name, changes, *words, code=1, command="check", **options):
    files = {"small.yaml": small(*changes), **options.pop("files", {})}
    return Case(name, f"{command} small.yaml", words, code=code, files=files, **options)


def loop(folder):
    os.symlink(".", folder / "raw/loop")
    os.symlink("itself", folder / "raw/itself")


CASES = [
    source("a source of a long name", [f"sources.0.name: {'x' * 101}"], "name: String should have at most 100 characters", code=2),
    source("a recipe of a long name", [f"name: {'x' * 101}"], "name: String should have at most 100 characters", code=2),
    source("a pipe", ["sources.0.paths: [raw/pipe]"], "raw/pipe: a pipe or device", make=lambda f: os.mkfifo(f / "raw/pipe")),
    source("a device", ["sources.0.paths: [/dev/zero]"], "/dev/zero: a pipe or device"),
    source("a glob without a match", ["sources.0.paths: [raw/*.json]"], "source notes: raw/*.json: no file matches"),
    source("a folder that is not there", ["sources.0.paths: [nowhere]"], "source notes: nowhere: no file matches"),
    source("an empty folder", ["sources.0.paths: [empty]"], "empty: no file matches", make=lambda f: (f / "empty").mkdir()),
    source("hidden files alone", ["sources.0.paths: [h]"], "h: no file matches", files={"h/.x.txt": "x"}),
    source("a home without the file", ["sources.0.paths: ['~/no-such-folder/*.txt']"], "no-such-folder/*.txt: no file"),
    source("a file address of a host", ["sources.0.paths: ['file://host/x.txt']"], "a file URL is file:///"),
    source("a relative file address", ["sources.0.paths: ['file:x.txt']"], "a file URL is file:///"),
    source("a file address without a file", ["sources.0.paths: ['file:///no/such/*.txt']"], "/no/such/*.txt: no file"),
    source("links in a loop without a match", ["sources.0.paths: ['raw/**/*.json']"], "no file matches", make=loop),
    source("a NUL in a path", ['sources.0.paths: ["raw/\\0"]'], "no file matches"),
    source("a path of 5,000 characters", [f"sources.0.paths: [{'x' * 5000}]"], "no file matches"),
    *[
        source(
            f"{name} read as {form}",
            [f"sources.0.format: {form}", "sources.0.paths: [mixed]"],
            f"source notes: mixed/other is {said}",
            f"which format {form} does not read",
            files={"mixed/other": content, "mixed/a.txt": "text"},
        )
        for name, (content, said) in KINDS.items()
        for form in ("jsonl", "text")
    ],
    source("two pictures", ["sources.0.paths: [p]"], "and 1 files more", files={"p/a.png": PNG, "p/b.png": PNG}),
    *[
        source(f"{command} with a picture", ["sources.0.paths: [p]"], "a PNG picture", command=command, files={"p/a": PNG})
        for command in ("run", "curate", "run --to curate")
    ],
    source(
        "two sources and two mistakes",
        ["sources: [{name: a, format: text, paths: [x]}, {name: b, format: text, paths: [y]}]"],
        "source a: x: no file matches",
        "source b: y: no file matches",
    ),
    source("two sources of one name", ["sources: [{name: a, format: text, paths: [x]}, {name: a, format: text, paths: [y]}]"],
           "two sources are named 'a'", code=2),
    source("a list that is not there", ["curate.lists: {badwords: [no.txt]}"], "no.txt", command="curate"),
    source("a benchmark that is not there", ["curate.decontaminate: {benchmarks: [{name: b, paths: [no.jsonl], fields: [q]}]}"],
           "curate.decontaminate.benchmarks b: no.jsonl: no such file"),
    source("a protected corpus that is not there", ["curate.near_dedup: {protected: [no]}"],
           "curate.near_dedup.protected: no: no such file or folder"),
    source("empty files", ["sources.0.paths: [e]"], "source notes: the files looked at are empty", command="curate", files={"e/a.txt": ""}),
    source("a packed file of no text", ["sources.0.format: jsonl", "sources.0.paths: [e]"], "source notes: its files hold no documents",
           command="curate", files={"e/a.jsonl.gz": gzip.compress(b"")}),
    source("a tokenizer that is not there", ["tokenizer: {pretrained: no/such/tokenizer.json}"], "no/such/tokenizer.json: no such file"),
    source("a tokenizer of another kind", ["tokenizer: {pretrained: raw/notes.txt}"], "a tokenizer is a .model, a .json or a .tiktoken"),
    source("a folder without a tokenizer", ["tokenizer: {pretrained: raw}"], "holds neither tokenizer.json nor"),
    source("a hub name offline", ["tokenizer: {pretrained: no-such/tokenizer}"], "the hub has none"),
    source("a first checkpoint that is not there", ["train.init_from: no/step-1"], "train.init_from: no/step-1 is not a checkpoint"),
    source("hardware", ["train.layout: {hardware: h10}"], "train.layout: hardware h10: no such profile", "did you mean h100?", code=2),
    source("automatic layout and hardware", ["train.layout: {auto: true, hardware: b2000}"], "hardware b2000", code=2),
    source("processes", ["train.layout: {data: 2}"], "= 2 processes, but 1 run; start 2", code=2, command="run"),
    source("processes of check", ["train.layout: {data: 2}"], "= 2 processes, but 3 run", code=2, command="check --processes 3"),
    source("processes of torchrun", ["train.layout: {data: 2}"], "but 4 run", code=2, command="run", environment={"WORLD_SIZE": "4"}),
    source("a work folder in the source's folder", ["sources.0.paths: [raw]"], "source notes: its paths hold files of the work folder raw/w",
           command="curate --workdir raw/w"),
    source("a source in the work folder", ["sources.0.paths: ['**/*.txt']"], "its paths hold files of the work folder raw",
           command="curate --workdir raw", files={"raw/curate/manifest.json": "{}", "raw/curate/x.txt": "ours"}),
    source("a rank that is no number", [], "RANK='x' in the environment is no number of processes", code=2, command="run", environment={"RANK": "x"}),
    source("a world of fewer than none", [], "WORLD_SIZE='-3' in the environment", code=2, command="run", environment={"WORLD_SIZE": "-3"}),
    source("a world of fewer than none, checked", [], "WORLD_SIZE='-3' in the environment", code=2, environment={"WORLD_SIZE": "-3"}),
    source("a rank outside the world", [], "RANK=5 in the environment, but WORLD_SIZE=1", "unset both", code=2, command="run", environment={"RANK": "5"}),
    source("tensor and heads", ["train.layout: {tensor: 4}"], "2 heads do not split evenly; legal for this model: [1, 2]", code=2),
    source("stages and layers", ["train.layout: {pipeline: 4}"], "4 stages but 2 layers", code=2),
    source("batch and context", ["train.batch_tokens: 100"], "a batch of 100 tokens is not a whole number of samples of 32", code=2),
    source("batch, context and data ranks", ["train.layout: {data: 3}"], "on each of 3 data ranks; try 288", code=2),
    source("ramp and context", ["train.batch_ramp: {start_tokens: 100, increment_tokens: 32, over_tokens: 2048}"],
           "a batch of 100 tokens is not a whole number", code=2),
    source("micro-batch", ["train.layout: {micro_batch: 3}"], "do not split into micro-batches of 3", code=2),
    source("micro-batches of a pipeline", ["train.layout: {pipeline: 2, micro_batch: 8}"], "needs 2 micro-batches or more", code=2),
    source("a misspelt task", ["evaluate: {tasks: [clozee]}"], "evaluate.tasks: no task 'clozee'; the nearest is 'cloze'", code=2),
    source("two misspelt tasks", ["evaluate: {tasks: [clozee, pica]}"], "no task 'clozee'", "no task 'pica'", code=2),
    source("a misspelt live task", ["train.evaluation: {every: 2, tasks: [bits_per_bytes]}"],
           "train.evaluation.tasks: no task 'bits_per_bytes'; the nearest is 'bits_per_byte'", code=2),
    source("a task without data", ["evaluate: {tasks: [piqa]}"], "evaluate.tasks:", "piqa"),
    source("no documents held out", ["curate.splits: {validation: 0.1, test: 0}"], "bits_per_byte, cloze need held-out documents", code=2),
    source("no documents held out, live", ["curate.splits: {test: 0}", "train.evaluation: {every: 2}", "evaluate: {tasks: [], num_continuations: 1}"],
           "train.evaluation.tasks: bits_per_byte need held-out documents", "evaluate.num_continuations needs held-out", code=2),
    source("cloze and a short context", ["model.sequence_length: 8"], "questions of cloze have at least 80 bytes", "model.sequence_length is 8", code=2),
]  # fmt: skip


@each(CASES)
def test_sources(case, expect_error):
    expect_error(case)
