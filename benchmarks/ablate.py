"""Does `gristmill ablate` find what it should find, and nothing else? Known faults planted in known text.

    python benchmarks/ablate.py --data corpora/books.jsonl --repetitions 10 --budget 120

Each repetition draws documents, spoils those of the arm, and runs a whole ablation with seeds of its own. Printed is
how often the arm was called worse, better, or neither on the documents held out of the unspoiled text.

  equal        other documents of the same text: a decision is a false one
  words        a tenth of the words of every document stand in another order
  boilerplate  three lines of a page's frame in every document
  language     15 % of the documents are in another language (--other FILE)
  repeated-R   a tenth of the text is one block of documents, R times (arXiv 2606.24998: worst in the middle)"""

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate.arms import arms_of
from gristmill.pipelines.ablate.experiment import AblationResult, Plan, experiment
from gristmill.pipelines.python_api import run

SET = "held out of baseline"
FRAME = (
    "Skip to content | Home | About us | Contact | Log in or create an account",
    "This site uses cookies. By using it you accept our terms of service and our privacy policy.",
    "Share this page on all networks. Copyright. All rights reserved. Back to top.",
)
REPEATED_SHARE = 0.1


def words(texts: list[str], rng: random.Random) -> list[str]:
    return [_shuffled(text, rng) for text in texts]


def _shuffled(text: str, rng: random.Random) -> str:
    parts = text.split(" ")
    chosen = [place for place in range(len(parts)) if rng.random() < 0.1]
    moved = [parts[place] for place in chosen]
    rng.shuffle(moved)
    for place, word in zip(chosen, moved, strict=True):
        parts[place] = word
    return " ".join(parts)


def boilerplate(texts: list[str], rng: random.Random) -> list[str]:
    return ["\n".join([FRAME[0], text, *FRAME[1:]]) for text in texts]


def repeated(times: int) -> Callable[[list[str], random.Random], list[str]]:
    """A tenth of the text is one block of documents, `times` times; the rest is as it was."""

    def spoil(texts: list[str], rng: random.Random) -> list[str]:
        room = int(len(texts) * REPEATED_SHARE)
        block = texts[: max(1, room // times)]
        return texts[room:] + block * times

    return spoil


def one_repetition(
    texts: list[str], spoil: Callable[[list[str], random.Random], list[str]], number: int, seconds: float
) -> AblationResult:
    rng = random.Random(number)
    chosen = rng.sample(texts, min(len(texts), 3000))
    with tempfile.TemporaryDirectory() as folder:
        root, recipes = Path(folder), []
        for name, arm_texts in (("clean", chosen), ("spoiled", spoil(chosen, rng))):
            (root / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in arm_texts))
            recipe = root / f"{name}.yaml"
            recipe.write_text(
                f"name: {name}\nseed: {number}\n"
                f"sources:\n  - {{name: s, format: jsonl, paths: ['{root / name}.jsonl']}}\n"
                "curate: {filters: [], exact_dedup: null, near_dedup: null, splits: {validation: 0.0, test: 0.1}}\n"
            )
            recipes.append(str(recipe))
        arms = arms_of(recipes, [])
        curated = [run(recipe, root / arm.name, "curate") / "curate" for recipe, arm in zip(recipes, arms, strict=True)]
        plan = Plan(root / "ablation", first_seed=100 * number, seconds=seconds)
        engine = LocalEngine(2, Reporter.silent())
        try:
            return experiment(arms, curated, plan, engine)
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSONL of clean documents with `text`")
    parser.add_argument("--other", type=Path, help="JSONL of documents in another language")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of an ablation")
    parser.add_argument("--controls", default="equal,words,boilerplate,language,repeated-3,repeated-30,repeated-300")
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in options.data.read_text("utf-8").splitlines()]
    other = []
    if options.other is not None:
        other = [json.loads(line)["text"] for line in options.other.read_text("utf-8").splitlines()]

    def language(texts: list[str], rng: random.Random) -> list[str]:
        foreign = int(0.15 * len(texts))
        return texts[foreign:] + [rng.choice(other) for _ in range(foreign)]

    def equal(chosen: list[str], rng: random.Random) -> list[str]:
        return rng.sample(texts, len(chosen))

    controls: dict[str, Callable[[list[str], random.Random], list[str]]] = {
        "equal": equal,
        "words": words,
        "boilerplate": boilerplate,
        "language": language,
        **{f"repeated-{times}": repeated(times) for times in (3, 30, 300)},
    }
    print("| control | worse | better | no decision | effect, bits per byte (each repetition) |\n|---|---|---|---|---|")
    for name in options.controls.split(","):
        if name == "language" and not other:
            print("| language | | | | not run: give --other |")
            continue
        rows = []
        for number in range(1, options.repetitions + 1):
            outcome = one_repetition(texts, controls[name], number, options.budget)
            rows.append(next(row for row in outcome.rows if row.set_name == SET))
        counts = Counter(row.decision for row in rows)
        listed = " ".join(f"{row.tuned.effect:+.4f}" for row in rows)
        print(f"| {name} | {counts['worse']} | {counts['better']} | {counts['no decision']} | {listed} |", flush=True)


if __name__ == "__main__":
    main()
