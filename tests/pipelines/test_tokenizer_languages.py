"""Goals by language, keys of translations, and the report's section on the tokenizer, by hand."""

import json

from gristmill.pipelines.report.blocks import Table
from gristmill.pipelines.report.tokenizer import tokenizer_blocks
from gristmill.pipelines.tokenizer_languages import missed_goals, translation_key
from gristmill.tokenizers.config import TokenizerGoals
from gristmill.tokenizers.report import GroupReport

GERMAN = GroupReport(
    group="de", documents=2, bytes=300, tokens=100, bytes_per_token=3.0, fertility=1.5, parity=1.25,
    byte_fallback=0.02, pieces=40,
)  # fmt: skip


def test_goals_for_all_languages_and_for_one():
    assert missed_goals(GERMAN, TokenizerGoals(max_parity=1.25, max_fertility={"fr": 1.0}, min_bytes_per_token=3)) == []
    missed = missed_goals(GERMAN, TokenizerGoals(max_parity=1.2, max_byte_fallback={"de": 0.01, "fr": 1}))
    assert missed == ["de: parity 1.2500, at most 1.2000", "de: byte_fallback 0.0200, at most 0.0100"]
    assert TokenizerGoals(max_parity=2, max_byte_fallback={"de": 0.01, "fr": 1}).languages() == {"de", "fr"}


def test_translations_share_the_last_two_parts_of_their_path():
    assert translation_key('{"path": "pages.de/linux/cat.md"}') == translation_key('{"path": "pages/linux/cat.md"}')
    assert [translation_key(text) for text in (None, "", "{}", "[1]", '{"path": 3}')] == [""] * 5


def test_the_section_of_the_report(tmp_path):
    assert tokenizer_blocks(tmp_path) == []
    content = {"reference": "en", "languages": [GERMAN.model_dump()], "vocabulary": {"Latn": 300, "single bytes": 100}}
    (tmp_path / "languages.json").write_text(json.dumps(content))
    languages, budget = (block for block in tokenizer_blocks(tmp_path) if isinstance(block, Table))
    assert languages.rows == (("German (de)", "2", "3.00", "1.50", "1.25", "2.00%", "40"),)
    assert budget.rows == (("Latn", "300", "75.0%"), ("single bytes", "100", "25.0%"))
