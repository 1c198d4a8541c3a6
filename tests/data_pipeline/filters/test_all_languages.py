"""Clean text of every profile's language passes the default curation, as the command runs it."""

import json
import unicodedata
from collections import Counter

import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import write_jsonl

from gristmill.data_pipeline.filters.profiles import SHIPPED_FOLDER, read_folder
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import language_code, text_scripts

PAGE_CHARS = 1800
# Taken by the language model for Tatar, English and Spanish, whose stop words they lack.
DETECTED_AS_ANOTHER = {"az_Cyrl", "mg_Latn", "qu_Latn"}
RECIPE = """\
name: languages
sources: [{name: udhr, format: jsonl, paths: [udhr.jsonl]}]
curate: {exact_dedup: null, near_dedup: null, splits: {}}
"""


def pages(text: str) -> list[str]:
    """Whole lines, of about a page; what is left at the end is no page."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if sum(map(len, found[-1])) > PAGE_CHARS:
            found.append([])
        found[-1].append(line)
    return ["\n".join(lines) for lines in found[:-1] or found]


@pytest.fixture(scope="module")
def declaration(shared_data):
    """Key of a profile -> pages of the Universal Declaration in its language. No other text exists in all of them."""
    keys = {key for key in read_folder(SHIPPED_FOLDER) if not key.startswith("und_")}
    found: dict[str, list[str]] = {}
    with shared_data("corpora/udhr.jsonl.zst").open("rb") as file:
        for line in zstandard.ZstdDecompressor().stream_reader(file).read().splitlines():
            record = json.loads(line)
            (script,) = text_scripts(TextBuffer.of([record["text"]]))
            key = f"{language_code(record['bcp47'].partition('-')[0])}_{script}"
            if key in keys:
                found.setdefault(key, []).extend(pages(record["text"]))
    return found


def test_nine_of_ten_pages_of_every_language_are_kept(call, declaration, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [{"text": page, "key": key} for key, texts in declaration.items() for page in texts]
    write_jsonl(tmp_path / "udhr.jsonl", records)
    (tmp_path / "languages.yaml").write_text(RECIPE)
    assert call("curate", "languages.yaml", "--workdir", "work")[0] == 0
    kept: Counter[str] = Counter()
    for path in (tmp_path / "work" / "curate" / "documents").rglob("*.parquet"):
        kept.update(json.loads(row)["key"] for row in pq.read_table(path)["metadata"].to_pylist())
    shares = {key: kept[key] / len(texts) for key, texts in declaration.items()}
    assert len(shares) > 100
    assert {key for key, share in shares.items() if share < 0.9} <= DETECTED_AS_ANOTHER
    assert {"vi_Latn", "fr_Latn", "zh_Hani"} <= {key for key, share in shares.items() if share == 1}


def test_stop_words_are_composed_and_of_their_language():
    """Vietnamese words were decomposed once, and French ones those of Welche."""
    profiles = read_folder(SHIPPED_FOLDER)
    assert {"và", "của", "có", "một"} <= set(profiles["vi_Latn"].stop_words)
    words = [word for profile in profiles.values() for word in profile.stop_words]
    assert words == [unicodedata.normalize("NFC", word) for word in words]
    assert {"de", "et", "la", "les", "des", "une"} <= set(profiles["fr_Latn"].stop_words)
    assert not {"drau", "èko", "lé"} & set(profiles["fr_Latn"].stop_words)
