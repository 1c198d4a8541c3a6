"""The papers about a small run: numbers by hand, schemas, what is open, and that a changed byte is noticed."""

import json
import shutil
from pathlib import Path

import duckdb
import mlcroissant
import pytest

from gristmill.pipelines.provenance.summary.bills_of_materials import check_bill, check_spdx
from gristmill.pipelines.provenance.summary.cards import check_croissant
from gristmill.pipelines.provenance.summary.papers import write_summary
from gristmill.pipelines.provenance.summary.summary_content import PaperAnswers, answers_form, open_questions
from gristmill.pipelines.python_api import run as run_recipe
from tests.support.corpora import prose, write_jsonl

PAPERS = ("public_summary.md", "dataset_card.md", "model_card.md", "bom.cdx.json", "spdx.json", "summary.json")
ADDRESSES = [
    f"https://{host}/{number}" for number in range(4) for host in ("a.mill.co.uk", "b.mill.co.uk", "flour.org")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The work folder of 12 documents of 3 hosts and 4 without an address, trained for a step, with its papers."""
    folder = tmp_path_factory.mktemp("papers")
    records = [{"text": f"Sack {url[-1]} of {url[8]} holds flour.", "url": url} for url in ADDRESSES]
    records += [{"text": f"Note {number} has no address."} for number in range(4)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    recipe = {
        "name": "papers",
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(folder / "a.jsonl")]}],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 300},
        "model": {"layers": 1, "width": 32, "heads": 2, "sequence_length": 16},
        "train": {"tokens": 32, "batch_tokens": 32, "precision": "fp32", "monitoring": {"trackers": []}},
    }
    workdir = run_recipe(recipe, folder / "work", "train")
    write_summary(workdir, workdir / "summary", None)
    return workdir


@pytest.fixture
def papers(run, tmp_path) -> tuple[Path, Path]:
    """(a copy of the work folder, the raw file)."""
    workdir = tmp_path / "work"
    shutil.copytree(run, workdir)
    return workdir, run.parent / "a.jsonl"


def facts_of(workdir: Path) -> dict[str, dict]:
    summary = json.loads((workdir / "summary" / "summary.json").read_text())
    return {fact["name"]: fact for fact in summary["facts"]}


def test_numbers_of_a_corpus_counted_by_hand(papers):
    workdir, raw = papers
    facts = facts_of(workdir)
    size = sum(len(json.loads(line)["text"]) for line in raw.read_text().splitlines())
    assert facts["documents"]["rows"] == [{"source": "s", "split": "train", "documents": 16, "bytes": size}]
    assert facts["num_domains"]["rows"] == [{"source": "s", "domains": 2, "documents": 12}]
    [top] = facts["domains"]["rows"]
    assert (top["domain"], top["documents"]) == ("mill.co.uk", 8)
    assert facts["raw_files"]["rows"] == [{"source": "s", "files": 1, "bytes": raw.stat().st_size}]
    assert [row["documents"] for row in facts["outcomes"]["rows"]] == [16]
    assert facts["model"]["rows"][0]["tokens"] == 32
    text = (workdir / "summary" / "public_summary.md").read_text()
    assert "less than 1 billion tokens" in text and facts["tokens"]["digest"] in text


def test_each_query_gives_its_rows_in_plain_duckdb(papers, monkeypatch):
    workdir, _ = papers
    monkeypatch.chdir(workdir)
    facts = facts_of(workdir)
    assert len(facts) >= 9
    for name, fact in facts.items():
        if "domain_of_host" not in fact["query"]:
            rows = duckdb.sql(fact["query"]).to_arrow_table().to_pylist()
            assert rows == fact["rows"], name


def test_the_check_notices_every_kind_of_change(papers, call):
    workdir, raw = papers
    code, said = call("summary", workdir, "--check")
    assert code == 0, said
    content = raw.read_bytes()
    raw.write_bytes(content.replace(b"Sack 0", b"Sock 0", 1))  # one byte
    code, said = call("summary", workdir, "--check")
    assert code == 1 and "a.jsonl: sha256 was" in said
    raw.write_bytes(content)
    path = workdir / "summary" / "dataset_card.md"
    path.write_text(path.read_text().replace("16", "17", 1))
    code, said = call("summary", workdir, "--check")
    assert code == 1 and "dataset_card.md: not what its facts and answers give" in said
    path = workdir / "summary" / "summary.json"
    path.write_bytes(path.read_bytes().replace(b'"domains":2', b'"domains":3'))
    code, said = call("summary", workdir, "--check")
    assert code == 1 and "summary.json: not a summary (altered after it was written" in said


def test_the_check_notices_a_changed_shard(papers, call):
    workdir, _ = papers
    shutil.copyfile(
        workdir / "curate/signals/train/s-00000.parquet", workdir / "curate/documents/train/s-00000.parquet"
    )
    code, said = call("summary", workdir, "--check")
    assert code == 1 and "documents/train/s-00000.parquet" in said


def test_documents_obey_their_schemas_and_broken_ones_are_refused(papers):
    workdir, _ = papers
    folder = workdir / "summary"
    bill = json.loads((folder / "bom.cdx.json").read_text())
    assert check_bill(json.dumps(bill).encode()) == []
    assert bill["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"] == [{"ref": "corpus"}]
    bill["metadata"]["component"]["modelCard"]["weight"] = 3
    assert "weight" in check_bill(json.dumps(bill).encode())[0]
    spdx = json.loads((folder / "spdx.json").read_text())
    assert check_spdx(json.dumps(spdx).encode()) == []
    assert {"ai_AIPackage", "dataset_DatasetPackage"} <= {element["type"] for element in spdx["@graph"]}
    for element in spdx["@graph"]:
        element.pop("created", None)
    assert "'created'" in check_spdx(json.dumps(spdx).encode())[0]
    croissant = json.loads((workdir / "croissant.json").read_text())
    assert croissant["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    assert check_croissant(json.dumps(croissant).encode()) == []
    croissant["recordSet"][0]["field"][0]["source"]["fileSet"]["@id"] = "nowhere"
    assert "nowhere" in " ".join(check_croissant(json.dumps(croissant).encode()))


def test_croissant_reads_the_records(papers):
    workdir, _ = papers
    records = list(mlcroissant.Dataset(workdir / "croissant.json").records("train"))
    assert len(records) == 16 and b"Note 3 has no address." in {record["train/text"] for record in records}


def test_what_only_a_person_knows_stays_open(papers, call, tmp_path):
    workdir, _ = papers
    code, said = call("summary", workdir)
    questions = list(open_questions(PaperAnswers(), ["s"]))
    assert code == 0 and f"{len(questions)} open questions" in said
    text = (workdir / "summary" / "public_summary.md").read_text()
    for field, question in questions:
        assert f"- `{field}`: {question}" in text
    assert (workdir / "summary" / "answers.yaml").read_text() == answers_form(["s"])
    (tmp_path / "answers.yaml").write_text(
        "provider: Mill | <b>\nsources: {s: {category: licensed, license: CC0-1.0}}\n"
    )
    assert call("summary", workdir, "--answers", tmp_path / "answers.yaml")[0] == 0
    text = (workdir / "summary" / "public_summary.md").read_text()
    assert "- Name and contact: Mill \\| \\<b\\>" in text and "- `provider`:" not in text
    assert text.index("2.2.1 Datasets licensed") < text.index("#### s") < text.index("2.2.2 Private")
    spdx = (workdir / "summary" / "spdx.json").read_text()
    assert "CC0-1.0" in spdx and spdx.count("hasDeclaredLicense") == 1


def test_wrong_answers_and_folders_are_told(papers, call, tmp_path):
    workdir, _ = papers
    (tmp_path / "answers.yaml").write_text("provder: Mill\n")
    code, said = call("summary", workdir, "--answers", tmp_path / "answers.yaml")
    assert code == 2 and "provder" in said and "provider" in said
    (tmp_path / "answers.yaml").write_text("sources: {t: {license: CC0-1.0}}\n")
    code, said = call("summary", workdir, "--answers", tmp_path / "answers.yaml")
    assert code == 1 and "sources.t: no source of the recipe; they are s" in said
    code, said = call("summary", tmp_path)
    assert code == 1 and "no complete stage curate; run `gristmill run RECIPE` first" in said
    (workdir / "summary" / "summary.json").unlink()
    code, said = call("summary", workdir, "--check")
    assert code == 1 and "summary.json: no such file; write the papers with `gristmill summary` first" in said


def test_verify_accepts_the_papers(papers, call):
    workdir, _ = papers
    assert all((workdir / "summary" / name).is_file() for name in PAPERS)
    assert call("verify", workdir)[0] == 0


def test_the_ten_documents_of_the_page(tmp_path, call):
    """docs/provenance.md, "Ten documents in the papers"."""
    urls = [f"https://a.mill.co.uk/{n}" for n in range(4)] + [f"https://b.mill.co.uk/{n}" for n in range(3)]
    urls += ["https://flour.org/0", "https://flour.org/1", ""]
    write_jsonl(tmp_path / "a.jsonl", [{"text": prose(n), "url": url} for n, url in enumerate(urls)])
    robots = {"host": "flour.org", "date": "2025-01-31", "robots": "User-agent: CCBot\nDisallow: /"}
    (tmp_path / "robots.jsonl").write_text(json.dumps(robots))
    recipe = {
        "name": "ten",
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(tmp_path / "a.jsonl")], "license": "CC0-1.0"}],
        "curate": {
            "lists": {"robots": [str(tmp_path / "robots.jsonl")]},
            "filters": ["robots"],
            "near_dedup": None,
            "splits": {"validation": 0.0, "test": 0.0},
        },
    }
    workdir = run_recipe(recipe, tmp_path / "work", "curate")
    assert call("summary", workdir)[0] == 0 and call("summary", workdir, "--check")[0] == 0
    facts = {name: fact["rows"] for name, fact in facts_of(workdir).items()}
    assert facts["reserved"] == [
        {"source": "s", "language": "en_Latn", "documents": 10, "rule": "robots.max_disallowed", "removed": 2}
    ]
    assert facts["num_domains"] == [{"source": "s", "domains": 1, "documents": 7}]
    assert [(row["domain"], row["documents"]) for row in facts["domains"]] == [("mill.co.uk", 7)]
    assert [(row["license"], row["documents"]) for row in facts["licenses"]] == [("CC0-1.0", 8)]
    assert [(row["robots_disallowed"], row["documents"]) for row in facts["robots"]] == [(None, 8)]
    text = (workdir / "summary" / "public_summary.md").read_text()
    assert "| s | en\\_Latn | robots.max\\_disallowed | 2 | 10 | 20.0% |" in text
    assert "2025-01-31 to 2025-01-31" in text
