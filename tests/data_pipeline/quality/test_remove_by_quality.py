"""The quality step of curation: its model, its scores and what it removes."""

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.quality.linear_model import load_linear_model
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from tests.support.corpora import prose, run_curate, tree_digests, write_jsonl

GOOD = [prose(k) for k in range(60)]
BAD = [prose(1000 + k).replace("the", "buy now").replace("river", "cheap") for k in range(60)]


def sources(tmp_path) -> list[SourceConfig]:
    write_jsonl(tmp_path / "books.jsonl", [{"text": text} for text in GOOD])
    write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in BAD + [prose(2000 + k) for k in range(6)]])
    return [
        SourceConfig(name=name, format="jsonl", paths=(str(tmp_path / f"{name}.jsonl"),)) for name in ("books", "web")
    ]


def test_the_score_is_a_signal_and_the_rule_stands_in_the_ledger(tmp_path):
    quality = {"positive": ("books",), "negative": ("web",), "keep": "quantile", "value": 0.5, "features": 2**12}
    counts = run_curate(sources(tmp_path), tmp_path / "one", quality=quality)["sources"]
    run_curate(sources(tmp_path), tmp_path / "two", quality=quality)
    assert tree_digests(tmp_path / "one/curate") == tree_digests(tmp_path / "two/curate")
    assert counts["web"]["removed"]["quality"]["documents"] == 33 and "quality" not in counts["books"]["removed"]
    row = next(
        r for r in pq.read_table(tmp_path / "one/curate/ledger/web-00000.parquet").to_pylist() if r["step"] == "quality"
    )
    assert row["outcome"] == "removed" and row["value"] < row["threshold"] and row["duplicate_of"] is None
    scores = pq.read_table(tmp_path / "one/curate/signals/train/web-00000.parquet").column("quality_score").to_pylist()
    assert min(scores) >= row["threshold"]
    fitted = load_linear_model(tmp_path / "one/curate/quality/quality.safetensors")
    assert fitted.report["auc"] > 0.8  # six of web's are books
    assert fitted.labels == ("books", "web")


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        RecipeError, match=r"curate.quality names 'wob', but there is no source of this name; did you mean 'web'"
    ):
        run_curate(sources(tmp_path), tmp_path, quality={"positive": ("books",), "negative": ("wob",)})


def test_a_class_with_too_few_documents_is_refused(tmp_path):
    books, web = sources(tmp_path)
    write_jsonl(tmp_path / "books.jsonl", [{"text": text} for text in GOOD[:19]])
    message = r"curate.quality: 19 distinct documents of the class 'books'; a model needs 20 of each"
    with pytest.raises(InputError, match=message):
        run_curate([books, web], tmp_path, quality={"positive": ("books",), "negative": ("web",)})
