"""Random removals of documents with SIGKILLs in between: what is left is a build without them, and nothing is lost."""

import json
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kills import kill_group_at, seed_of

from gristmill.data_pipeline.annotate.tombstones import TOMBSTONES_NAME
from gristmill.foundation.files import file_digest
from gristmill.foundation.manifest import CACHE_FOLDER
from gristmill.pipelines.provenance.verify import verify

UNDISTURBED, REMOVALS, SLOW_REMOVALS = 2, 2, 50
NUM_DOCUMENTS = 120
WORDS = [
    f"{begin}{end}" for begin in ("bar", "dol", "mir", "tan", "vel", "zor") for end in ("an", "eth", "is", "o", "u")
]
RECIPE = """\
name: forgotten
seed: 7
sources:
  - {{name: s, format: jsonl, paths: ["{raw}/*.jsonl"]}}
curate: {{filters: [], language_id: null, splits: {{validation: 0.1, test: 0.1}}}}
tokenizer: {{vocab_size: 300, sample_bytes: 100k}}
"""


def write_raw(raw: Path) -> None:
    """A file a document; every fifth is a copy, every seventh a near copy of an earlier one."""
    raw.mkdir()
    texts: list[str] = []
    for number in range(NUM_DOCUMENTS):
        generator = random.Random(number)
        text = " ".join(generator.choice(WORDS) for _ in range(100))
        if number % 5 == 4:
            text = generator.choice(texts).replace(" ", "  ")
        elif number % 7 == 6:
            text = f"{generator.choice(texts)} zoris"
        texts.append(text)
        (raw / f"{number:03d}.jsonl").write_text(json.dumps({"text": text, "number": number}) + "\n")


def names_by_id(work: Path) -> dict[str, str]:
    lock = json.loads((work / "lock.json").read_bytes())
    names = {file["sha256"]: file["name"] for file in lock["sources"][0]["files"]}
    rows = pq.read_table(work / "curate" / "ledger", columns=["doc_id", "raw_digest"]).to_pylist()
    return {row["doc_id"]: names[row["raw_digest"]] for row in rows}


def outputs(work: Path) -> dict[str, str]:
    """Files of all stages but those that say how they were made."""
    files = [path for stage in ("curate", "tokenizer") for path in (work / stage).rglob("*") if path.is_file()]
    files = [
        path for path in files if CACHE_FOLDER not in path.relative_to(work).parts
    ]  # it remembers inodes and times
    made_with = ("manifest.json", TOMBSTONES_NAME)
    return {str(path.relative_to(work)): file_digest(path) for path in files if path.name not in made_with}


def removals_with_kills(launcher, folder: Path, removals: int, seed: int) -> int:
    """The number of kills. After each removal the outputs are those of a build from raw files without its documents."""
    write_raw(folder / "raw")
    (folder / "recipe.yaml").write_text(RECIPE.format(raw=folder / "raw"))
    work, killed, rng = folder / "work", 0, random.Random(seed)
    launcher.run("run", "recipe.yaml", "--workdir", work, "--to", "tokenizer", cwd=folder)

    def draw_document() -> dict[str, str]:
        documents = names_by_id(work)
        (folder / "ids.txt").write_text("\n".join(rng.sample(sorted(documents), 1)))
        return documents

    removal: tuple[object, ...] = ("forget", work, "--ids", folder / "ids.txt", "--workers", 1)
    for _ in range(UNDISTURBED):  # the first compiles; moments are drawn from the time of the last one
        draw_document()
        _, seconds = launcher.run(*removal, cwd=folder)
    for number in range(removals):
        before, command = draw_document(), removal
        while kill_group_at(launcher.start(*command, cwd=folder), rng.uniform(0, 1.5 * seconds)):
            killed += 1
            pending = (work / "statements" / "pending.json").is_file()
            done = len(list((work / "statements").glob("forget-*.json"))) == UNDISTURBED + number + 1
            command = ("forget", work, "--resume", "--workers", 1) if pending else command
            if done and not pending:
                break
        if (work / "statements" / "pending.json").is_file():
            launcher.run("forget", work, "--resume", cwd=folder)
        assert verify(work).wrong == [], f"seed {seed}, removal {number}"
        left = names_by_id(work)
        assert left.keys() < before.keys()
        fresh = folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        raw = Path(shutil.copytree(folder / "raw", fresh / "raw"))
        for path in raw.glob("*.jsonl"):
            if path.name not in left.values():
                path.unlink()
        (fresh / "recipe.yaml").write_text(RECIPE.format(raw=raw))
        launcher.run("run", "recipe.yaml", "--workdir", fresh / "work", "--to", "tokenizer", cwd=fresh)
        assert outputs(work) == outputs(fresh / "work"), f"seed {seed}, removal {number}"
    return killed


def test_removals_that_are_killed(launcher, tmp_path):
    removals_with_kills(launcher, tmp_path, REMOVALS, seed_of(45))


@pytest.mark.slow
def test_many_removals_that_are_killed(launcher, tmp_path):
    assert removals_with_kills(launcher, tmp_path, SLOW_REMOVALS, seed_of(450)) >= SLOW_REMOVALS // 5
