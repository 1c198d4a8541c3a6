"""Does `gristmill ablate` find what it should find, and nothing else? Known faults planted in known text.

    python benchmarks/ablate.py --folder work/ablate-controls

Each repetition draws documents of its own, spoils those of every arm, and runs an ablation with seeds of its own. Every
control is judged as an experiment of two arms, the clean text and the spoiled one; the controls of a repetition share
the runs on clean text. Printed is how often the spoiled arm was called worse, better, or neither on clean documents
that no arm trains on.

  equal        other documents of the same text: a decision is a false one
  words        a tenth of the words of every document stand in another order
  boilerplate  three lines of a page's frame in every document
  language     15 % of the documents are in other languages
  repeated-R   a tenth of what a run reads is one block of documents, R times (arXiv 2606.24998: worst in the middle)

A repetition that is finished stands in FOLDER/results.jsonl and is not run again; the same command goes on after a
stop. Text: the books of the shared test data, and its tldr pages in other languages."""

import argparse
import hashlib
import html
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from gristmill.evaluation.results.ablation import LEVEL
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate.compare_arms import compare_arms
from gristmill.pipelines.ablate.corpora import Arm
from gristmill.pipelines.ablate.experiment import AblationResult, Plan, experiment
from gristmill.pipelines.ablate.runs import Budget
from gristmill.pipelines.recipes.recipe_file import load_recipe

FRAME = (
    "Skip to content | Home | About us | Contact | Log in or create an account",
    "This site uses cookies. By using it you accept our terms of service and our privacy policy.",
    "Share this page on all networks. Copyright. All rights reserved. Back to top.",
)
LANGUAGES = ("de", "es", "fr", "it", "nl", "pt_BR")
REPEATED_SHARE, FOREIGN_SHARE, MOVED_SHARE = 0.1, 0.15, 0.1
DOCUMENT_CHARACTERS = 1500  # paragraphs of a book are put together to so many
RESULTS = "results.jsonl"
FAULTS = "words,boilerplate,language,repeated-3,repeated-30,repeated-300"
CORPORA = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data") / "corpora"

Spoil = Callable[[list[str], random.Random], list[str]]


def words(texts: list[str], rng: random.Random) -> list[str]:
    return [_with_moved_words(text, rng) for text in texts]


def _with_moved_words(text: str, rng: random.Random) -> str:
    parts = text.split(" ")
    chosen = [place for place in range(len(parts)) if rng.random() < MOVED_SHARE]
    moved = [parts[place] for place in chosen]
    rng.shuffle(moved)
    for place, word in zip(chosen, moved, strict=True):
        parts[place] = word
    return " ".join(parts)


def boilerplate(texts: list[str], rng: random.Random) -> list[str]:
    return ["\n".join([FRAME[0], text, *FRAME[1:]]) for text in texts]


def repeated(times: int, seeds: int) -> Spoil:
    """A tenth of the documents are one block, as often as each of the seeds, which read parts of the text of their own,
    meets it `times` times. A block shorter than a document is the beginning of one, several times in each."""

    def spoil(texts: list[str], rng: random.Random) -> list[str]:
        places = rng.sample(range(len(texts)), int(len(texts) * REPEATED_SHARE))
        copies = times * seeds
        block = [texts[place] for place in places[: max(1, len(places) // copies)]]
        in_each = -(-copies // len(places))
        if in_each > 1:
            block = ["\n".join([block[0][: len(block[0]) // in_each]] * in_each)]
        spoiled = list(texts)
        for number, place in enumerate(places):
            spoiled[place] = block[number % len(block)]
        return spoiled

    return spoil


def foreign(others: Sequence[str]) -> Spoil:
    """Documents of others stand in place of some, as long in all."""

    def spoil(texts: list[str], rng: random.Random) -> list[str]:
        spoiled = list(texts)
        for place in rng.sample(range(len(texts)), int(len(texts) * FOREIGN_SHARE)):
            pieces: list[str] = []
            while sum(map(len, pieces)) < len(texts[place]):
                pieces.append(rng.choice(others))
            spoiled[place] = "\n".join(pieces)
        return spoiled

    return spoil


def records(name: str) -> list[dict[str, str]]:
    content = zstandard.ZstdDecompressor().decompressobj().decompress((CORPORA / name).read_bytes())
    return [json.loads(line) for line in content.splitlines()]


def book_documents() -> list[str]:
    """Paragraphs of the books, put together to documents of some length."""
    documents = []
    for record in records("books_xhtml.jsonl.zst"):
        paragraphs = re.findall(r"<p\b[^>]*>(.*?)</p>", record["html"], re.DOTALL)
        document: list[str] = []
        for paragraph in paragraphs:
            text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", paragraph))).strip()
            if text:
                document.append(text)
            if sum(map(len, document)) > DOCUMENT_CHARACTERS:
                documents.append("\n".join(document))
                document = []
    return documents


def repetition(
    texts: Sequence[str], controls: dict[str, Spoil], number: int, options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """A record for each control. Goes on from what stands in `folder`, which is removed at the end."""
    rng = random.Random(number)
    size = options.documents
    drawn = rng.sample(texts, (1 + options.equal) * size + options.held_out)
    clean = drawn[:size]
    arms_texts = {"clean": clean}
    arms_texts |= {f"equal-{arm}": drawn[arm * size : (arm + 1) * size] for arm in range(1, options.equal + 1)}
    arms_texts |= {name: spoil(clean, random.Random(number)) for name, spoil in controls.items()}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "held_out.jsonl"
    target.write_text("\n".join(json.dumps({"text": text}) for text in drawn[(1 + options.equal) * size :]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"name: controls\nseed: {number}\nsources: [{{name: s, format: jsonl, paths: [none.jsonl]}}]\n")
    recipes = [load_recipe(str(recipe)) for _ in arms_texts]
    arms = [Arm(name, arm_recipe) for name, arm_recipe in zip(arms_texts, recipes, strict=True)]
    corpora = [write_corpus(arm_texts, folder / name) for name, arm_texts in arms_texts.items()]
    budget = Budget(None, options.flops, options.seeds)
    plan = Plan(
        folder / "ablation",
        options.seeds,
        first_seed=1000 * number,
        seconds=None,
        flops=options.flops * budget.num_runs(len(arms)) / budget.num_runs(2),
        targets=(target,),
    )
    outcome = experiment(arms, corpora, plan, LocalEngine(1, Reporter.silent()))
    judged = [judge(outcome, arm, name, number) for arm, name in enumerate(arms_texts) if arm]
    shutil.rmtree(folder)
    return judged


def write_corpus(texts: Sequence[str], folder: Path) -> Path:
    """A corpus folder as curation writes it. Documents with one number stand in one place of the arms' samples, as
    documents of one raw record do."""
    numbers = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(len(texts))]
    (folder / "documents" / "train").mkdir(parents=True, exist_ok=True)
    documents = pa.table({"doc_id": numbers, "text": texts, "language": ["en_Latn"] * len(texts)})
    pq.write_table(documents, folder / "documents" / "train" / "s-00000.parquet")
    return folder


def judge(outcome: AblationResult, arm: int, name: str, number: int) -> dict[str, Any]:
    """The verdict of an experiment of two arms, the baseline and this one."""
    bits = {
        (int(place > 0), seed, rate): values
        for (place, seed, rate), values in outcome.bits.items()
        if place in (0, arm)
    }
    ((row,), _) = compare_arms(["baseline", name], outcome.held_out, bits, outcome.rates, outcome.plan.seeds)
    return {
        "control": "equal" if name.startswith("equal") else name,
        "repetition": number,
        "decision": row.decision,
        "effect": row.tuned.effect,
        "error": row.tuned.error,
        "p": row.tuned.p,
        "low_effect": row.low.effect,
        "low_error": row.low.error,
        "low_p": row.low.p,
        "rate": outcome.rates[0],
        "parameters": outcome.size.parameters,
        "tokens": outcome.tokens,
        "seeds": outcome.plan.seeds,
        "bits_per_byte": next(iter(outcome.baseline_bits.values())),
        "cpu_seconds": outcome.cpu_seconds / len(outcome.arms),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Counts of decisions, the mean effect, its spread over repetitions, and decisions of the tuned rate alone."""
    lines = [
        "| control | repetitions | worse | better | no decision | effect | spread | decided at the tuned rate alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(result["control"] for result in results):
        rows = [result for result in results if result["control"] == name]
        counts = Counter(row["decision"] for row in rows)
        effects = [row["effect"] for row in rows]
        alone = sum(row["p"] < LEVEL for row in rows)
        lines.append(
            f"| {name} | {len(rows)} | {counts['worse']} | {counts['better']} | {counts['no decision']} | "
            f"{np.mean(effects):+.4f} | {np.std(effects):.4f} | {alone} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("work/ablate-controls"))
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="number of the first one: others draw other documents")
    parser.add_argument("--controls", default=FAULTS, help="planted faults")
    parser.add_argument("--equal", type=int, default=4, help="equal arms of each repetition")
    parser.add_argument("--flops", type=float, default=4.8e12, help="of an experiment of two arms")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--documents", type=int, default=1000, help="of each arm")
    parser.add_argument("--held-out", type=int, default=60, help="clean documents to score")
    parser.add_argument("--show", action="store_true", help="print the table of what is finished, and end")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / RESULTS
    results = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    if not options.show:
        finished = {result["repetition"] for result in results}
        texts = book_documents()
        others = [record["text"] for record in records("tldr.jsonl.zst") if record["language"] in LANGUAGES]
        faults: dict[str, Spoil] = {
            "words": words,
            "boilerplate": boilerplate,
            "language": foreign(others),
            **{f"repeated-{times}": repeated(times, options.seeds) for times in (3, 30, 300)},
        }
        for number in range(options.first, options.first + options.repetitions):
            if number in finished:
                continue
            chosen = {name: faults[name] for name in options.controls.split(",") if name}
            judged = repetition(texts, chosen, number, options, options.folder / f"repetition-{number}")
            results += judged
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(result) + "\n" for result in judged))
            print(table(results), flush=True)
    print(table(results))
    print(json.dumps({"figure": "ablation_controls", "results": len(results), "flops": options.flops}))


if __name__ == "__main__":
    main()
