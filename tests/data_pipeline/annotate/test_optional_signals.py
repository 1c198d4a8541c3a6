"""Signals that a recipe asks for, from recipe to ledger: lists, paragraphs' languages, personal data to drop."""

import random
import re
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.annotate.list_file import BadWords, BlockedUrls, lock_lists
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from tests.support.corpora import prose, tree_digests, write_jsonl

GERMAN = "Der Fluss treibt die Mühle, und der Müller mahlt das Korn für das ganze Dorf.\n" * 12


def run(folder: Path, texts: list[str], workers: int = 1, urls: list[str] | None = None, **settings) -> dict[int, dict]:
    """Record number -> its row of the ledger."""
    records = [{"text": text, "url": (urls or [""] * len(texts))[k]} for k, text in enumerate(texts)]
    write_jsonl(folder / "s.jsonl", records)
    source = SourceConfig(name="s", format="jsonl", paths=(str(folder / "s.jsonl"),))
    engine = LocalEngine(workers, Reporter.silent())
    config = CurateConfig(**{"filters": [], "near_dedup": None, **settings})
    lock = Lock(sources=(*resolve([source], engine), *lock_lists(config.lists)))
    curate(CurationInputs([source], config, 1, lock, folder / "curate", folder / "cache", engine))
    return {row["record"]: row for row in pq.read_table(folder / "curate/ledger/s-00000.parquet").to_pylist()}


def signals_of(folder: Path) -> dict[str, dict]:
    paths = sorted((folder / "curate/signals").rglob("*.parquet"))
    return {row["doc_id"]: row for path in paths for row in pq.read_table(path).to_pylist()}


def listed(folder: Path, name: str, text: str) -> dict:
    (folder / f"{name}.txt").write_text(text)
    return {name: (str(folder / f"{name}.txt"),)}


@pytest.mark.parametrize("filters", [["badwords"], ["c4"]])
def test_a_bad_word_takes_a_document_by_its_rule(tmp_path, filters):
    texts = [prose(k).replace("\n", "\n\n") for k in range(9)]
    texts[3] += "\nThe DARN mill stands by the darn river."
    rows = run(tmp_path, texts, filters=filters, lists=listed(tmp_path, "badwords", "# words\ndarn\n\nred mill\n"))
    taken = rows[3]
    assert (taken["rule"], taken["value"], taken["threshold"]) == (f"{filters[0]}.max_bad_words", 2, 0)
    assert [row["outcome"] for number, row in rows.items() if number != 3] == ["kept"] * 8


def test_texts_of_extreme_zlib_ratio_are_dropped_by_mgpts_rule(tmp_path):
    texts = [prose(0), "the same line again\n" * 200, random.Random(1).randbytes(600).hex(), prose(3), "\U0001f600 ab"]
    rows = run(tmp_path, texts, filters=["mgpt_zlib", {"gopher_quality": {"min_stop_words": None}}], profiles=None)
    assert rows[1]["rule"] == "mgpt_zlib.min_zlib_ratio" and rows[4]["rule"] == "mgpt_zlib.max_zlib_ratio"
    for number in (1, 4):
        raw = texts[number].strip().encode()
        assert rows[number]["value"] == len(zlib.compress(raw, 6)) / len(raw)
    assert "mgpt_zlib" not in {rows[number]["rule"].partition(".")[0] for number in (0, 2, 3) if rows[number]["rule"]}
    assert all(0.15 <= row["zlib_ratio"] <= 1 for row in signals_of(tmp_path).values())


def test_one_number_in_the_recipe_lets_two_bad_words_through(tmp_path):
    texts = [prose(k) for k in range(9)]
    texts[3] += "\nThe darn mill stands by the darn river."
    texts[4] += "\nDarn, darn, darn."
    wanted = {"filters": [{"badwords": {"max_bad_words": 2}}], "lists": listed(tmp_path, "badwords", "darn")}
    assert [row["outcome"] for row in run(tmp_path, texts, **wanted).values()] == ["kept"] * 4 + ["removed"] + [
        "kept"
    ] * 4


def test_a_blocked_address_takes_a_document(tmp_path):
    urls = ["", "https://mill.org/a", "http://www.spam.example/x", "http://notspam.example/"] + [""] * 5
    lists = listed(tmp_path, "blocked_urls", "spam.example\n")
    rows = run(tmp_path, [prose(k) for k in range(9)], urls=urls, filters=["blocked_urls"], lists=lists)
    assert [number for number, row in rows.items() if row["rule"] == "blocked_urls.max_blocked"] == [2]


def test_another_list_measures_anew_and_the_same_one_elsewhere_does_not(tmp_path):
    texts = [prose(k) for k in range(9)]
    wanted = {"filters": ["badwords"], "lists": listed(tmp_path, "badwords", "darn")}
    annotated = lambda: sorted(path.name for path in (tmp_path / "cache/annotated").glob("*.parquet"))  # noqa: E731
    run(tmp_path, texts, **wanted)
    first = annotated()
    (tmp_path / "moved").mkdir()
    run(tmp_path, texts, filters=["badwords"], lists=listed(tmp_path / "moved", "badwords", "darn"))
    assert annotated() == first
    run(tmp_path, texts, filters=["badwords"], lists=listed(tmp_path, "badwords", "darn\nheck"))
    assert annotated() != first


def test_personal_data_drops_a_document(tmp_path):
    texts = [prose(k) for k in range(12)]
    texts[2] += "\nCall 212-555-0199 or +49 30 1234 5678."
    texts[5] += "\nWrite to reader@mill.org."
    texts[7] += "\nThe host 8.8.8.8 is up, 10.0.0.1 is not."
    texts[8] += "\nThe host 10.0.0.1 is down."
    rows = run(tmp_path, texts, pii={"phone": "drop", "email": "drop", "ip": "replace"})
    assert {number: (row["rule"], row["value"]) for number, row in rows.items() if row["outcome"] == "removed"} == {
        2: ("pii.phone", 2),
        5: ("pii.email", 1),
    }
    replaced = {row["doc_id"]: row["pii_replaced"] for row in signals_of(tmp_path).values()}
    assert replaced[rows[7]["doc_id"]] == 1 and sum(replaced.values()) == 1


def test_paragraphs_in_two_languages(tmp_path):
    texts = [prose(k) for k in range(9)]
    texts[4] = f"{prose(4)}\n\n{GERMAN}"
    rows = run(tmp_path, texts, workers=2, filters=["mixed_languages"], paragraph_languages={})
    assert rows[4]["rule"] == "mixed_languages.min_main_share" and 0.5 < rows[4]["value"] < 0.7
    kept = signals_of(tmp_path)[rows[3]["doc_id"]]
    assert (kept["main_language"], kept["main_language_share"], kept["num_languages"]) == ("en", 1.0, 1)


def test_stop_words_of_the_detected_language(tmp_path):
    texts = [prose(k) for k in range(9)]
    texts[4] = GERMAN
    rows = run(tmp_path, texts, filters=["language_stop_words"])
    assert all(row["outcome"] == "kept" for row in rows.values())
    kept = signals_of(tmp_path)[rows[4]["doc_id"]]
    assert kept["detected_language"] == "de" and kept["num_language_stop_words"] >= 4
    assert kept["num_stop_words"] == 0  # Gopher's own are English


def test_workers_change_no_byte(tmp_path):
    texts = [f"{prose(k)}\n\n{GERMAN}" for k in range(40)]
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        lists = listed(tmp_path, "badwords", "darn") | listed(tmp_path, "blocked_urls", "a.b")
        run(tmp_path / str(workers), texts, workers, lists=lists, paragraph_languages={}, pii={"phone": "drop"})
    assert tree_digests(tmp_path / "1/curate") == tree_digests(tmp_path / "2/curate")


@pytest.mark.parametrize("name", ["badwords", "blocked_urls", "mixed_languages"])
def test_a_filter_without_its_signal_is_refused_with_the_mend(tmp_path, name):
    with pytest.raises(RecipeError, match=rf"filter {name}: nothing is measured for it; .*curate\."):
        run(tmp_path, [prose(1)], filters=[name])


def test_a_list_that_is_not_there_or_empty(tmp_path):
    with pytest.raises(InputError, match=r"none\.txt: no file matches"):
        run(tmp_path, [prose(1)], lists={"badwords": (str(tmp_path / "none.txt"),)})
    with pytest.raises(InputError, match=r"badwords\.txt: the list is empty; write one entry per line"):
        run(tmp_path, [prose(1)], lists=listed(tmp_path, "badwords", "# nothing\n\n"))


@pytest.mark.parametrize(
    ("phrases", "text", "count"),
    [
        (["darn"], "Darn it, DARN! darned", 2),
        (["ass"], "class, ass_, bass ass", 1),
        (["red mill"], "a Red\n mill, redmill, red mills", 1),
        (["red", "red mill"], "Red mill, red door", 3),
        (["f*ck", "a$$"], "F*ck! a$$ff*ck a$$", 3),  # a phrase that ends in no word character is free there
        (["磨坊"], "红磨坊在河边", 1),
        (["müller"], "MÜLLER Müllerin", 1),
        (["darn"], "", 0),
    ],
)
def test_worked_examples(phrases, text, count):
    assert BadWords(phrases).count(text) == count


PHRASES = ["a", "a b", "b-c", "*a", "c_", "坊", "坊a"]


@given(st.text(alphabet="abcA_* -\n坊é", max_size=40), st.sets(st.sampled_from(PHRASES), min_size=1))
def test_it_finds_what_c4_finds(text, phrases):
    """C4's own expression, (?:\\W|^)(words)(?:\\W|$), for phrases of word characters in scripts with spaces."""
    plain = sorted(phrase for phrase in phrases if re.fullmatch(r"[a-z_ -]+", phrase))
    if plain:
        wanted = re.compile(rf"(?:\W|^)({'|'.join(map(re.escape, plain))})(?:\W|$)")
        spaced = " ".join(text.split())
        assert (BadWords(plain).count(spaced) > 0) == (wanted.search(spaced.lower()) is not None)
    assert BadWords(phrases).count(text) == sum(BadWords([phrase]).count(text) for phrase in phrases)


LIST = BlockedUrls(["example.com", "Forum.org/bad/", "https://mill.net/a?x"])


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("http://example.com", True),
        ("https://WWW.Example.com:8080/any?x#y", True),
        ("http://me@example.com/", True),
        ("example.com./a", True),
        ("http://badexample.com/", False),
        ("http://example.com.evil.net/", False),
        ("http://forum.org/bad/thread", True),
        ("http://forum.org/Bad/", False),
        ("http://www.forum.org/bad/", False),
        ("http://forum.org/good", False),
        ("http://mill.net/a?x=1", True),
        ("http://mill.net/a", False),
        ("http://other.net/?u=example.com", False),
        ("", False),
    ],
)
def test_hosts_with_all_below_them_and_begins_of_addresses(url, blocked):
    assert LIST.blocks(url) is blocked
