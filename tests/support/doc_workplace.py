"""A folder in which the blocks of the pages are run: the files that they name, small, and finished runs."""

import bz2
import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import yaml
import zstandard
from corpora import prose, write_jsonl
from fasttext_file import write_model
from page_blocks import Block, page_blocks, shell_lines

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data").resolve()
ROOT = Path(__file__).parents[2]
MINE = {
    "name": "mine",
    "sources": [{"name": name, "format": "jsonl", "paths": [f"{name}.jsonl"]} for name in ("text", "web")],
    "curate": {"splits": {"validation": 0.1, "test": 0.1}, "near_dedup": {"keep_signatures": True}},
    "tokenizer": {"vocab_size": 300},
    "model": {"layers": 4, "width": 32, "heads": 2, "sequence_length": 64},
    "train": {"tokens": 8192, "batch_tokens": 1024, "precision": "fp32", "monitoring": {"trackers": []}},
    "evaluate": {"tasks": ["bits_per_byte"], "num_continuations": 0},
}
# What a reader puts in the place of a name in capitals, and sizes that suit a test: (page or "", pattern, replacement).
SUBSTITUTIONS = [
    ("", r"\bRECIPE\b", "mine.yaml"),
    ("", r"\bRUN/train/checkpoints/step-00000200\b", "work/mine/train/checkpoints/step-00000008"),
    ("", r"\bRUN\b", "work/mine"),
    ("", r"\bMANIFEST\b", "work/mine/index/manifest.json"),
    ("", r"\bHUGGING_FACE_FOLDER\b", "exported"),
    ("", r"\bDATA\b|/shared/benchmarks\b", str(SHARED)),
    ("", r"\.\./shared/data\b", str(SHARED)),
    ("", r"--checkpoint [AB]\b", "--checkpoint work/mine"),
    ("", r"--corpus DIR\b", "--corpus work/mine"),
    ("", r"\bDIR\b", "work/mine/curate"),
    ("", r"\bwork/demo\b", "work/mine"),
    ("", r"/models/(gpt2|mpt)\b", "exported"),
    ("", r"--nproc-per-node \d", "--nproc-per-node 2"),
    ("", r"--minutes 10", "--budget 1e10"),
    ("", r"--tasks (small|mtnlg)\b", "--tasks piqa,copa"),
    ("", r"(gristmill evaluate .*--tasks (?!.*--limit).*)", r"\1 --limit 20"),
    ("", r"work/bert_tiny/tokenizer", "work/mine/tokenizer"),
    ("", r"work/bert_tiny/train/checkpoints/step-00000600", "work/mine/train/checkpoints/step-00000008"),
    ("mixing.md", r"--budget 6e12 --confirm 1e13", "--runs 4 --budget 2e10 --confirm 2e10 --seeds 3"),
    ("provenance.md", r"--step 4100\b", "--step 4"),
    ("provenance.md", r"3f2a\.\.\.", "TRAINED_ID"),
    ("provenance.md", r"\bFILE\b", "answers.yaml"),
    ("provenance.md", r"--ids answers.yaml", "--ids ids.txt"),
    (
        "provenance.md",
        r"gristmill forget \S+ --resume",
        "true",
    ),  # tests/pipelines/forget interrupts one
    ("provenance.md", r"summary WORKDIR\b", "summary work/mine"),
    ("provenance.md", r"\bWORKDIR\b", "work/my"),
    ("provenance.md", r"(curate|run) mine.yaml", r"\1 my.yaml"),
    ("tokenizers.md", r"--vocab-size 8000 --train-bytes 1000000", "--vocab-size 400 --train-bytes 20000"),
    ("README.md", r"layout\.data=8", "layout.data=2"),
    ("README.md", r"(run demo_local)", r"\1 --to curate"),
    ("path_small_model.md", r"(gristmill chat)", r"\1 --tokens 8 < prompts.txt"),
    ("path_slurm.md", r"/shared/run/train", "work/mine/train"),
]


def make_workplace(folder: Path) -> None:
    """Writes the files and runs mine.yaml; about a minute."""
    write_programs(folder / "bin")
    write_texts(folder)
    write_lists(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(MINE, sort_keys=False))
    (folder / "my.yaml").write_text(yaml.safe_dump(MINE | {"name": "my"}, sort_keys=False))
    for name in ("first", "second"):
        texts = [{"text": prose(k)} for k in range(500 if name == "first" else 600, 640)]
        write_jsonl(folder / f"{name}.jsonl", texts)
        source = {"name": "text", "format": "jsonl", "paths": [f"{name}.jsonl"]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(MINE | {"name": name, "sources": [source]}))
    must_run(folder, "gristmill run mine.yaml --workers 1")
    must_run(folder, "gristmill run my.yaml --workers 1")
    (folder / "ids.txt").write_text(a_document(folder, "--corpus work/my") + "\n")
    must_run(folder, "gristmill curate first.yaml --workers 1 && gristmill curate second.yaml --workers 1")
    must_run(folder, "gristmill export --checkpoint work/mine --output exported")


def write_programs(folder: Path) -> None:
    """The programs that the pages type, of this interpreter."""
    folder.mkdir(parents=True)
    for name, module in (
        ("gristmill", "gristmill.pipelines.cli.main"),
        ("torchrun", "torch.distributed.run"),
        ("python", ""),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {"-m " + module if module else ""} "$@"\n')
        (folder / name).chmod(0o755)
    (folder.parent / ".venv").mkdir()
    (folder.parent / ".venv" / "bin").symlink_to(folder)


def write_texts(folder: Path) -> None:
    texts = [{"text": prose(k), "url": f"https://mill.example/{k}"} for k in range(300)]
    texts[5]["text"] += " Lorem ipsum dolor."
    write_jsonl(folder / "text.jsonl", texts)
    for name in ("notes", "my/notes/deep", "work", "good", "wiki"):
        (folder / name).mkdir(parents=True)
    for k in range(60):
        for name, suffix in (("notes", "txt"), ("my/notes/deep", "md"), ("good", "txt"), ("wiki", "txt")):
            (folder / name / f"{k}.{suffix}").write_text("\n\n".join(prose(1000 + 7 * k + part) for part in range(7)))
    bad = [{"text": f"buy now {k} " * 40} for k in range(60)]
    labelled = [{"text": prose(k), "grade": 4 + k % 2} for k in range(60)]
    labelled += [{**page, "grade": k % 2} for k, page in enumerate(bad)]
    for path, records in (
        ("bad.jsonl", bad), ("my/data/a.jsonl", texts[:60]), ("labelled.jsonl", labelled), ("texts.jsonl", texts),
        ("web.jsonl", [{"text": prose(k), "number": k} for k in range(300, 400)]),
        ("books.jsonl", [{"text": prose(k)} for k in range(400, 450)]), ("code/a.jsonl", texts[:9]),
        ("prompts.jsonl", [{"id": "a", "prompt": "The mill"}, {"id": "b", "prompt": "def main(", "max_tokens": 4}]),
    ):  # fmt: skip
        write_jsonl(folder / path, records)
    for path in ("bad.jsonl", "my/data/a.jsonl"):
        (folder / f"{path}.zst").write_bytes(zstandard.compress((folder / path).read_bytes()))
    write_pages(folder)
    (folder / "prompts.txt").write_text("The mill\n\n")
    (folder / "page.txt").write_text(prose(510))
    pages = [warc_record(k) for k in range(60)]
    for path in ("crawl/a.warc.gz", "data/a.warc.gz"):
        (folder / path).parent.mkdir()
        (folder / path).write_bytes(b"".join(gzip.compress(page) for page in pages))
    for name in ("books", "web"):
        connection = duckdb.connect()
        path = folder / f"{name}.parquet"
        columns = (
            f"md5('{name}' || range) AS doc_id, 'A mill, ' || range AS text, '2025-01-31' AS date, 'MIT' AS license"
        )
        connection.sql(f"SELECT {columns} FROM range(40)").write_parquet(str(path))
    (folder / "fineweb").mkdir()
    shutil.copy(folder / "web.parquet", folder / "fineweb" / "a.parquet")


def write_pages(folder: Path) -> None:
    """Labelled pages and books in HTML, packed."""
    texts = [(prose(6000 + k), "article") for k in range(300)]
    others = ("listing", "collection", "product")
    texts += [(f"offer {k}: {prose(7000 + k, 8)} buy now", others[k % 3]) for k in range(300)]
    pages = [{"main_content": text, "page_type": kind, "html": html_page(text)} for text, kind in texts]
    books = [{"html": html_page(prose(8000 + k))} for k in range(600)]
    for name, records in (("pages", pages), ("books", books)):
        write_jsonl(folder / f"{name}_html.jsonl", records)
        packed = zstandard.compress((folder / f"{name}_html.jsonl").read_bytes())
        (folder / f"{name}.jsonl.zst").write_bytes(packed)


def html_page(text: str) -> str:
    paragraphs = "".join(f"<p>{line}</p>" for line in text.splitlines())
    return f"<html lang=en><head><title>Mill</title></head><body><article>{paragraphs}</article></body></html>"


def write_lists(folder: Path) -> None:
    """Lists, benchmarks and models that recipes name."""
    (folder / "lists").mkdir()
    (folder / "lists" / "english.txt").write_text("swearword\n")
    (folder / "lists" / "hosts.txt").write_text("bad.example\n")
    (folder / "lists" / "opt_outs.txt").write_text("# date: 2025-01-31\nout.example\n")
    (folder / "robots").mkdir()
    robots = {"url": "https://mill.example/robots.txt", "status": 200, "date": "2025-01-31", "robots": "User-agent: *"}
    write_jsonl(folder / "robots" / "more.jsonl", [robots])
    body = b"User-agent: *\nDisallow: /private\n"
    (folder / "robots" / "a.warc.gz").write_bytes(gzip.compress(warc_response("https://mill.example/robots.txt", body)))
    (folder / "models").mkdir()
    write_model(folder / "models" / "fasttext_oh_eli5.bin", {"mill": "hq", "buy": "cc"})
    write_model(folder / "models" / "topics.bin", {"mill": "trade", "horse": "farm"})
    for kind in ("train", "dev_matched"):
        pairs = [{"sentence1": prose(k, 12), "sentence2": prose(k + 1, 12), "gold_label": "neutral"} for k in range(9)]
        write_jsonl(folder / f"multinli_1.0_{kind}.jsonl", pairs)
    (folder / "answers.yaml").write_text("")
    (folder / "model.yaml").write_text("{layers: 24, width: 2048, heads: 16, sequence_length: 2048, vocab_size: 51200}")
    (objective,) = (block for block in page_blocks(ROOT / "docs/objectives.md") if "class Contrastive" in block.body)
    (folder / "my_objective.py").write_text(objective.body)
    questions = [{"query": f"River {k} is", "choices": ["long", "short"], "gold": k % 2} for k in range(6)]
    write_jsonl(folder / "benchmarks" / "rivers.jsonl", questions)
    write_jsonl(folder / "held_out" / "ours.jsonl", [{"id": 1, "question": prose(9000), "choices": ["a", "b"]}])
    (folder / "hellaswag_val.txt.bz2").write_bytes(
        bz2.compress(f"{prose(9, 12)}\n0\nIt ends.\nNo.\nYes.\nWell.\n".encode())
    )


def warc_record(number: int) -> bytes:
    paragraphs = "".join(f"<p>{line}</p>" for k in range(4) for line in prose(4000 + 5 * number + k).splitlines())
    page = f"<html lang=en><head><title>Mill {number}</title></head><body><article>{paragraphs}</article></body></html>"
    return warc_response(f"https://mill.example/{number}", page.encode(), "text/html")


def warc_response(url: str, body: bytes, media_type: str = "text/plain") -> bytes:
    content = f"HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\n\r\n".encode() + body
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2025-01-31T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:{len(url):08d}-0000-0000-0000-000000000000>\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def must_run(folder: Path, script: str) -> str:
    code, said = run_script(folder, script)
    assert code == 0, f"{script}\n{said}"
    return said


def run_script(folder: Path, script: str) -> tuple[int, str]:
    """Exit code and the end of what a bash script says, which stops at its first error."""
    environment = os.environ | {
        "GRISTMILL_SHARED_DATA": str(SHARED),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def substituted(page: str, line: str, folder: Path) -> str:
    """A command of a page with the workplace's names in the place of those in capitals."""
    for only, pattern, replacement in SUBSTITUTIONS:
        if only in ("", page):
            line = re.sub(pattern, replacement, line)
    line = line.replace("TRAINED_ID", "DOC_ID")
    return re.sub(r"\bDOC_ID\b", lambda _: a_document(folder, line), line)


def a_document(folder: Path, line: str) -> str:
    corpus = match[1] if (match := re.search(r"--corpus (\S+)", line)) else "work/mine"
    ledger = f"{folder / corpus}/curate/ledger/*.parquet"
    return duckdb.sql(f"SELECT doc_id FROM '{ledger}' ORDER BY 1 LIMIT 1").fetchall()[0][0]


def merged_recipe(fields: dict) -> dict:
    """A block's fields in a recipe that can be checked; a whole recipe stays as it is but for what it leaves out."""
    recipe = {**MINE, "tokenizer": dict(MINE["tokenizer"])}
    for name, value in fields.items():
        both = (
            isinstance(value, dict)
            and isinstance(recipe.get(name), dict)
            and not {"transformers", "pretrained"} & value.keys()
        )
        recipe[name] = {**recipe[name], **value} if both else value
    return recipe


def run_block(block: Block, folder: Path) -> str | None:
    """What went wrong when the block was run; None if nothing did."""
    if block.kind == "shell":
        for line in shell_lines(block.body):
            command = substituted(block.page, line, folder)
            code, said = run_script(folder, command)
            if code:
                return f"{block.id}: {command}\nexit code {code}\n{said}"
        return None
    if block.kind == "recipe":
        fields = yaml.safe_load(block.body)
        name = fields.get("name") or f"{block.page.removesuffix('.md')}_{block.number}"
        recipe = merged_recipe(fields) | {"name": name}
        (folder / f"{name}.yaml").write_text(substituted("", yaml.safe_dump(recipe, sort_keys=False), folder))
        command = f"gristmill check {name}.yaml"
    elif block.kind == "profile":
        profile = yaml.safe_load((ROOT / "training" / "planner" / "profiles" / "h100.yaml").read_text("utf-8"))
        (folder / "profile.yaml").write_text(yaml.safe_dump(profile | yaml.safe_load(block.body)))
        command = "gristmill layout llama_1b --gpus 256 --hardware profile.yaml"
    elif block.kind == "task":
        (folder / "rivers.yaml").write_text(block.body)
        command = f"gristmill evaluate --checkpoint work/mine --data . --tasks {folder}/rivers.yaml"
    elif block.kind == "python":
        path = folder / (match[1] if (match := re.match(r"# (\w+\.py)\n", block.body)) else "block.py")
        path.write_text(substituted(block.page, block.body, folder))
        command = f"python {path.name}" + (" page.html" if "sys.argv[1]" in block.body else "")
    elif block.kind == "page":
        (folder / "page.html").write_text(block.body)
        return None
    else:
        (folder / "query.sql").write_text(substituted(block.page, block.body, folder))
        command = "python -c 'import duckdb; print(duckdb.sql(open(\"query.sql\").read()))'"
    code, said = run_script(folder, command)
    return f"{block.id}: {command}\nexit code {code}\n{said}" if code else None
