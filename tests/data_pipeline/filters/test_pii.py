import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.filters.pii import (
    PII_KINDS,
    PiiConfig,
    count_pii,
    is_public_ip,
    may_hold_pii,
    pii_pattern,
    replace_pii,
)
from gristmill.data_pipeline.filters.presets import pii_rules
from gristmill.data_pipeline.readers.source import SourceConfig
from tests.support.corpora import prose, run_curate, write_jsonl

ALL = PiiConfig(phone="replace")


def test_addresses_are_replaced():
    assert replace_pii("mail a.b+c@mail.example.org, or 8.8.8.8.", PiiConfig()) == (
        "mail email@example.com, or 192.0.2.1.",
        2,
    )
    assert replace_pii("a@b and @name and x@y.z1", PiiConfig()) == ("a@b and @name and x@y.z1", 0)


def test_addresses_that_name_no_one_stay():
    for address in ("10.0.0.1", "192.168.1.7", "127.0.0.1", "0.0.0.0", "192.0.2.1", "256.1.1.1", "1.2.3.4.5"):
        assert replace_pii(f"host {address} up", PiiConfig())[1] == 0
    assert is_public_ip("93.184.216.34") and not is_public_ip("172.16.0.1")


def test_phone_numbers_are_replaced_when_asked_for():
    for number in ("+49 30 1234 5678", "(212) 555-0199 12", "212-555-0199"):
        assert replace_pii(f"call {number} now", ALL) == ("call +1-555-0100 now", 1)
    for other in ("2024-11-20", "1234567890", "3.14159", "0.5-1.5", "10 000 000"):
        assert replace_pii(f"on {other} we", ALL)[1] == 0
    assert replace_pii("call 212-555-0199", PiiConfig())[1] == 0


@pytest.mark.parametrize(
    "number, digits",
    [
        ("+49 30 1234", 8),
        ("+49 301 1234", 9),
        ("+49 301 12 345", 10),
        ("+49 301 12 34 56", 11),
        ("+49 30 1234 5678", 12),
        ("+49 3012 1234 567", 13),
        ("+49 3012 1234 5678", 14),
        ("+493 3012 1234 5678", 15),
        ("+49 3012 1234 5678 90", 16),
        ("+493 3012 1234 5678 90", 17),
    ],
)
def test_phone_numbers_have_10_to_15_digits(number, digits):
    """E.164 allows 15."""
    assert sum(map(str.isdigit, number)) == digits
    assert count_pii(f"call {number} now", "phone") == int(10 <= digits <= 15)


def test_doing_it_twice_changes_nothing():
    once, count = replace_pii("a@b.org 8.8.8.8 212-555-0199", ALL)
    assert count == 3 and replace_pii(once, PiiConfig(email="keep"))[1] == 0


def test_the_corpus_is_written_without_them(tmp_path):
    texts = [f"{prose(k)}\nWrite to reader{k}@mill.org today." for k in range(6)]
    write_jsonl(tmp_path / "s.jsonl", [{"text": text} for text in texts])
    source = SourceConfig(name="s", format="jsonl", paths=(str(tmp_path / "s.jsonl"),))
    counts = run_curate([source], tmp_path, pii=PiiConfig())["sources"]["s"]
    assert counts["read"]["documents"] == 6
    for split in ("train", "validation", "test"):
        documents = pq.read_table(tmp_path / f"curate/documents/{split}/s-00000.parquet").column("text").to_pylist()
        assert all("Write to email@example.com today." in text for text in documents)
        replaced = (
            pq.read_table(tmp_path / f"curate/signals/{split}/s-00000.parquet").column("pii_replaced").to_pylist()
        )
        assert replaced == [1] * len(documents)


def test_places_are_counted_as_they_would_be_replaced():
    text = "a@b.org, 8.8.8.8, 10.0.0.1, 212-555-0199 and email@example.com"
    assert [count_pii(text, kind) for kind in ("email", "ip", "phone")] == [1, 1, 1]
    assert PiiConfig(ip="drop", phone="drop").dropped == ("ip", "phone")
    assert replace_pii(text, PiiConfig(email="drop", ip="drop"))[1] == 0
    assert [rule.label for rule in pii_rules(PiiConfig(phone="drop"))] == ["pii.phone"] and pii_rules(None) == ()


def flagged(texts: list[str], kinds) -> list[bool]:
    raw = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, raw)])
    return may_hold_pii(np.frombuffer(b"".join(raw) + b" ", np.uint8), bounds, kinds).any(axis=0).tolist()


def test_texts_that_cannot_hold_personal_data_are_seen_without_a_pattern():
    texts = ["a@b.org", " @name", "8.8.8.8", "version 1.2.3", "call 212-555-0199", "", "π = 3.14", "at @ noon", "x"]
    assert flagged(texts, ["email"]) == [True, False, False, False, False, False, False, False, False]
    assert flagged(texts, ["ip"]) == [False, False, True, False, False, False, False, False, False]
    assert flagged(texts, ["phone"]) == [False, False, True, True, True, False, True, False, False]
    assert flagged(texts, []) == [False] * 9 and flagged([], PII_KINDS) == []


def test_no_text_with_a_match_is_missed():
    rng = random.Random(3)
    parts = ("8", "88", "212", ".", "..", "@", "a", "é", "_", "-", " ", "+", "(", ")", "\n", "x.org", "10.1", "8.8.8.8")
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(20_000)]
    texts += [f"{'x ' * (k % 40)}{text}" for k, text in enumerate(texts[:4000])]  # over the ends of blocks of 64 bytes
    held = 0
    for kind in PII_KINDS:
        config = PiiConfig(**{name: "replace" if name == kind else "keep" for name in PII_KINDS})
        for text, may_hold in zip(texts, flagged(texts, [kind]), strict=True):
            found = replace_pii(text, config)[1]
            assert may_hold or not found, text
            held += found > 0
    assert held > 500


def test_in_a_corpus_the_texts_are_those_of_one_by_one(tmp_path):
    found = ["a@b.org", "8.8.8.8", "no address", "10.0.0.1 is private", "two: c@d.org and 9.9.9.9"]
    texts = [f"{prose(k)} {found[k % 5]}." for k in range(30)]
    write_jsonl(tmp_path / "s.jsonl", [{"text": text} for text in texts])
    source = SourceConfig(name="s", format="jsonl", paths=(str(tmp_path / "s.jsonl"),))
    run_curate([source], tmp_path, pii=PiiConfig())
    written = {}
    for path in (tmp_path / "curate/documents").rglob("*.parquet"):
        counts = pq.read_table(tmp_path / "curate/signals" / path.parent.name / path.name).column("pii_replaced")
        for row, count in zip(pq.read_table(path).to_pylist(), counts.to_pylist(), strict=True):
            written[row["text"]] = count
    assert written == dict(replace_pii(text, PiiConfig()) for text in texts)


def test_addresses_are_those_that_the_pattern_finds_from_left_to_right():
    rng = random.Random(4)
    parts = ("a", "a1", "_", ".", "@", "b.org", "x.y.net", " ", "-", "+", "é", "%", "a" * 70)
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 14))) for _ in range(20_000)]
    config = PiiConfig(ip="keep")
    counts = [replace_pii(text, config) == pii_pattern("email").subn("email@example.com", text) for text in texts]
    assert all(counts) and sum(pii_pattern("email").search(text) is not None for text in texts) > 200
