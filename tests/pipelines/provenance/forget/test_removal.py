"""`gristmill forget` on a small corpus: what it finds, what is built without it, and what the statement proves."""

import json
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate.tombstones import TOMBSTONES_NAME, read_tombstones
from gristmill.data_pipeline.corpus.document_history import why
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.pipelines.cli.main import main
from gristmill.pipelines.cli.options import StageOptions, make_runner, selected_stages
from gristmill.pipelines.provenance.forget.statement import statement_path, wrong_with_statements
from gristmill.pipelines.provenance.verify import verify
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate

MADE_WITH = ("manifest.json", TOMBSTONES_NAME)  # files that say how a corpus was made
NUM_DOCUMENTS = 40
WORDS = [
    f"{begin}{end}" for begin in ("bar", "dol", "mir", "tan", "vel", "zor") for end in ("an", "eth", "is", "o", "u")
]


def text_of(seed: int, words: int = 120) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(words)) + "."


def write_raw(folder: Path, left_out: frozenset[str] = frozenset()) -> None:
    """A file for each document, so that a build without one reads the same other files: NUM_DOCUMENTS texts, a copy of
    the first with other white space, a near copy of it, and a copy of it under another host."""
    folder.mkdir(parents=True)
    first = text_of(0)
    texts = {f"d{number:02d}": text_of(number) for number in range(NUM_DOCUMENTS)}
    texts |= {"copy": first.replace(" ", "  "), "near": f"{first} vanan zoris", "host": first}
    for name, text in texts.items():
        if name not in left_out:
            host = "news.example.org" if name in ("host", "d07", "d08") else "example.com"
            line = json.dumps({"text": text, "url": f"https://{host}/{name}"})
            (folder / f"{name}.jsonl").write_text(f"{line}\n")


def recipe_of(raw: Path) -> dict:
    source = {"name": "s", "format": "jsonl", "paths": [f"{raw}/*.jsonl"], "url_field": "url"}
    return {
        "name": "forgotten",
        "seed": 3,
        "sources": [source],
        "curate": {"filters": [], "splits": {"validation": 0.1, "test": 0.1}},
    }


def outputs(corpus: Path) -> dict[str, str]:
    files = (path for path in corpus.rglob("*") if path.is_file() and path.name not in MADE_WITH)
    return {path.relative_to(corpus).as_posix(): file_digest(path) for path in files if "/cache/" not in str(path)}


def ids_by_name(workdir: Path) -> dict[str, str]:
    """File name without suffix -> doc_id, of all documents that were read."""
    lock = json.loads((workdir / "lock.json").read_bytes())
    names = {file["sha256"]: file["name"].removesuffix(".jsonl") for file in lock["sources"][0]["files"]}
    rows = pq.read_table(workdir / "curate" / "ledger", columns=["doc_id", "raw_digest"]).to_pylist()
    return {names[row["raw_digest"]]: row["doc_id"] for row in rows}


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forget")
    write_raw(folder / "raw")
    run_recipe(recipe_of(folder / "raw"), folder / "work", "curate", workers=1)
    return folder


@pytest.fixture
def work(built, tmp_path) -> Path:
    return Path(shutil.copytree(built / "work", tmp_path / "work"))


def forget_ids(work: Path, *names: str) -> int:
    ids = ids_by_name(work)
    (work.parent / "ids.txt").write_text("\n".join(ids[name] for name in names))
    return command("forget", work, "--ids", work.parent / "ids.txt", "--workers", 1)


def test_what_is_left_is_a_build_from_raw_files_without_the_documents(work, tmp_path):
    assert forget_ids(work, "d00", "d05") == 0
    write_raw(tmp_path / "raw", frozenset(["d00", "d05", "copy", "near", "host"]))
    other = run_recipe(recipe_of(tmp_path / "raw"), tmp_path / "other", "curate", workers=1)
    assert outputs(work / "curate") == outputs(other / "curate")
    verification = verify(work)
    assert verification.wrong == []
    assert verification.lines[-1].endswith("1 removals, 5 documents: none is in the corpus")


def test_copies_are_named_in_the_plan_which_changes_nothing(work, capsys):
    ids = ids_by_name(work)
    (work.parent / "ids.txt").write_text(ids["copy"])
    before = outputs(work)
    assert command("forget", work, "--ids", work.parent / "ids.txt", "--plan", "--workers", 1) == 0
    assert "4 documents: 1 asked for, 2 exact copy, 1 near copy" in capsys.readouterr().out
    assert {name: digest for name, digest in outputs(work).items() if not name.startswith("cache/")} == {
        name: digest for name, digest in before.items() if not name.startswith("cache/")
    }
    assert not (work / TOMBSTONES_NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--host", "example.org"], ["copy", "d00", "d07", "d08", "host", "near"]),
        (["--rule", "SELECT doc_id FROM documents WHERE url LIKE '%/d1_'"], [f"d1{digit}" for digit in range(10)]),
    ],
)
def test_documents_of_a_host_and_of_a_rule(work, arguments, names):
    ids = ids_by_name(work)
    assert command("forget", work, *arguments, "--workers", 1) == 0
    assert sorted(ids_by_name(work)) == sorted(ids.keys() - set(names))


def test_a_text_is_found_in_all_its_copies(work):
    (work.parent / "text.txt").write_text(text_of(0).replace(" ", "\n"))
    assert command("forget", work, "--text", work.parent / "text.txt", "--workers", 1) == 0
    assert not {"d00", "copy", "near", "host"} & ids_by_name(work).keys()


def test_a_removed_text_stays_out_of_a_new_file_and_its_text_is_nowhere(work, built, tmp_path):
    assert forget_ids(work, "d03") == 0
    raw = Path(shutil.copytree(built / "raw", tmp_path / "raw"))
    (raw / "new.jsonl").write_text(json.dumps({"text": text_of(3), "url": ""}) + "\n")
    recipe = validate(recipe_of(raw), "recipe")
    stages, _ = selected_stages(recipe, "curate")
    make_runner(recipe, stages, StageOptions(workers=1, workdir=work, overwrite=True), update_lock=True).run()
    texts = pq.read_table(work / "curate" / "documents", columns=["text"]).column("text").to_pylist()
    assert text_of(3) not in texts
    assert len(texts) == NUM_DOCUMENTS - 1
    beginning = text_of(3)[:40].encode()
    assert not [path for path in work.rglob("*") if path.is_file() and beginning in path.read_bytes()]


def test_a_document_comes_back_when_its_tombstones_are_taken_away(work, built):
    assert forget_ids(work, "d03") == 0
    (work / TOMBSTONES_NAME).unlink()
    shutil.rmtree(work / "statements")
    run_recipe(recipe_of(built / "raw"), work, "curate", workers=1)
    assert outputs(work / "curate") == outputs(built / "work" / "curate")


def test_why_names_the_removal_of_a_document(work):
    doc_id = ids_by_name(work)["d03"]
    assert forget_ids(work, "d03") == 0
    with pytest.raises(InputError, match=r"was taken out by removal 1 of .*forget-0001\.json"):
        why(doc_id, work)


def test_a_second_removal_is_chained_to_the_first(work):
    assert forget_ids(work, "d03") == 0
    assert forget_ids(work, "d04") == 0
    assert verify(work).wrong == []
    path = statement_path(work, 1)
    path.write_bytes(path.read_bytes().replace(b'"documents":1', b'"documents":2'))
    assert any("forget-0001.json: not a statement" in line for line in verify(work).wrong)


def test_verify_finds_a_document_that_has_a_tombstone(work, built):
    assert forget_ids(work, "d03") == 0
    shard = next((built / "work" / "curate" / "documents" / "train").glob("*.parquet"))
    shutil.copy(shard, work / "curate" / "documents" / "train" / shard.name)
    assert any("have a tombstone" in line for line in verify(work).wrong)


def test_the_check_after_a_removal_finds_the_id_of_a_document_that_stayed(work, built):
    assert forget_ids(work, "d03") == 0
    assert not list(wrong_with_statements(work, [], reads_texts=False))
    ids = Path("curate") / "ids" / "00000.ids"
    shutil.copy(built / "work" / ids, work / ids)
    [wrong] = wrong_with_statements(work, [], reads_texts=False)
    assert f"holds {ids_by_name(built / 'work')['d03']}, which have a tombstone" in wrong


def test_tombstones_that_were_changed_stop_the_next_run(work, built):
    assert forget_ids(work, "d03") == 0
    tombstones = read_tombstones(work)
    assert tombstones is not None
    digest = tombstones.requests[0].ids[0]
    path = work / TOMBSTONES_NAME
    path.write_bytes(path.read_bytes().replace(digest.encode(), b"0" * 32))
    with pytest.raises(InputError, match=r"tombstones\.json: not a list of tombstones"):
        run_recipe(recipe_of(built / "raw"), work, "curate", workers=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("xyz", "line 1: 'xyz' is no document id"),
        ("\n", "no document id in it"),
        ("0" * 32, "no document that was read"),
    ],
)
def test_wrong_ids_are_named(work, capsys, content, said):
    (work.parent / "ids.txt").write_text(content)
    assert command("forget", work, "--ids", work.parent / "ids.txt", "--workers", 1) in (1, 2)
    assert said in capsys.readouterr().err


def test_one_subject_is_needed(work, capsys):
    assert command("forget", work, "--workers", 1) == 2
    assert "give one of --ids FILE" in capsys.readouterr().err
