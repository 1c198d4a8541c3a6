import json
import re
import xml.etree.ElementTree as ET

import pytest

from gristmill.pipelines.report.curation import quarantine_blocks, repair_blocks
from gristmill.pipelines.report.flow import BAND, Flow, flow_of, flow_svg, rule_order

COUNTS = {
    "rules": {"a": [{"rule": "text.min_chars"}, {"rule": "gopher_quality.min_words"}, {"rule": "c4.min_sentences"}]},
    "sources": {
        "a": {
            "read": {"documents": 10, "bytes": 100},
            "kept": {"train": {"documents": 4, "bytes": 40}, "test": {"documents": 1, "bytes": 9}},
            "removed": {
                "near_dedup": {"documents": 1, "bytes": 9},
                "c4.min_sentences": {"documents": 1, "bytes": 9},
                "gopher_quality.min_words": {"documents": 2, "bytes": 9},
            },
            "quarantined": {"invalid_json": {"documents": 1, "bytes": 0}},
        }
    },
}


def test_documents_by_step_in_the_order_of_the_steps():
    flow = flow_of(COUNTS)
    assert [(step, removed["a"]) for step, removed in flow.removed.items()] == [
        ("quarantine", 1),
        ("gopher_quality", 2),
        ("c4", 1),
        ("near_dedup", 1),
    ]
    assert flow.ends == {"train": {"a": 4}, "validation": {"a": 0}, "test": {"a": 1}} and flow.read == {"a": 10}
    assert rule_order(COUNTS)[:3] == ["text.min_chars", "gopher_quality.min_words", "c4.min_sentences"]


def test_bands_are_as_high_as_their_documents():
    drawn = flow_svg(flow_of(COUNTS)).decode()
    heights = [float(height) for height in re.findall(r'width="7.0" height="([\d.]+)"', drawn)]
    assert heights[:2] == [BAND, BAND / 10]  # all that was read, and the one that could not be
    assert {"read 10", "−2 (20.0 %)", "train 4", "test 1"} <= set(ET.fromstring(drawn).itertext())


def test_equal_numbers_give_equal_bytes_and_names_are_escaped():
    evil = 'a"><script>alert(1)</script>'
    flow = Flow((evil,), {evil: 3}, {f"{evil}_step": {evil: 1}}, {"train": {evil: 2}})
    assert flow_svg(flow) == flow_svg(flow)
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(flow_svg(flow)).iter()}
    assert tags == {"svg", "style", "path", "rect", "text"}


def test_a_picture_that_would_not_add_up_is_not_drawn():
    with pytest.raises(ValueError, match="3 documents read, 2 removed or kept"):
        flow_svg(Flow(("a",), {"a": 3}, {}, {"train": {"a": 2}}))
    assert ET.fromstring(flow_svg(Flow(("a",), {"a": 0}, {}, {"train": {"a": 0}})))


def test_repairs_by_source_stand_beneath_the_flow():
    assert repair_blocks({"a": {"changed": {}}}) == []
    [table] = repair_blocks({"a": {"changed": {"nfc": 1200, "line_ends": 3}}, "b": {"changed": {}}})
    assert table.columns == ("source", "line ends", "nfc")
    assert table.rows == (("a", "3", "1,200"), ("b", "0", "0"))


def test_quarantine_is_counted_by_kind(tmp_path):
    line = {
        "source": "a",
        "raw_digest": "d",
        "record": 3,
        "reason": "no JSON",
        "excerpt": "{",
        "unreadable": "invalid_json",
    }
    (tmp_path / "quarantine.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "record": 9}) + "\n")
    _, kinds, records = quarantine_blocks(tmp_path, {"d": "a.jsonl"})
    assert kinds.rows == (("a", "invalid_json", "2"),)
    assert records.rows[1] == ("a", "a.jsonl", "9", "no JSON", "{")
