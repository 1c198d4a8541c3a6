"""Host, licence and day of the crawl as columns of the signals, from Parquet columns and WARC headers."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gristmill.data_pipeline.annotate.optional_signals import OriginFields, day_of, origin_fields
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from tests.support.corpora import prose


@pytest.mark.parametrize(
    ("value", "day"),
    [
        ("2014-02-16T05:02:21Z", "2014-02-16"),
        ("2014-02-16 05:02:21", "2014-02-16"),
        (20140216, "2014-02-16"),
        ("20140216050221", "2014-02-16"),
        ("2014-13-16", None),
        ("16 February 2014", None),
        (1392526941000000, None),
        (True, None),
        (None, None),
    ],
)
def test_days_are_read_and_never_guessed(value, day):
    assert day_of(value) == day


def test_columns_of_a_parquet_source_reach_the_corpus(tmp_path):
    stamps = [datetime.datetime(2024, 1, 11), None, datetime.datetime(2024, 2, 1)]
    table = {
        "text": [prose(k) for k in range(3)],
        "url": ["https://A.mill.org/x", "", "https://b.mill.org"],
        "terms": ["CC-BY-4.0", None, "CC0-1.0"],
        "fetched": pa.array(stamps, pa.timestamp("us")),
    }
    pq.write_table(pa.table(table), tmp_path / "s.parquet")
    source = SourceConfig(
        name="s",
        format="parquet",
        paths=(str(tmp_path / "s.parquet"),),
        license="Apache-2.0",
        license_field="terms",
        crawl_date_field="fetched",
    )
    engine = LocalEngine(1, Reporter.silent())
    lock = Lock(sources=tuple(resolve([source], engine)))
    config = CurateConfig(filters=[], near_dedup=None, splits={"validation": 0.0, "test": 0.0})
    curate(CurationInputs([source], config, 1, lock, tmp_path / "curate", tmp_path / "cache", engine))
    rows = pq.read_table(tmp_path / "curate/signals/train/s-00000.parquet").to_pylist()
    assert [(row["host"], row["license"], row["crawl_date"]) for row in rows] == [
        ("a.mill.org", "CC-BY-4.0", "2024-01-11"),
        (None, "Apache-2.0", None),
        ("b.mill.org", "CC0-1.0", "2024-02-01"),
    ]


def test_sources_without_such_fields_get_no_columns():
    plain = SourceConfig(name="s", format="jsonl", paths=("a.jsonl",))
    assert origin_fields(plain) is None and "license" not in plain.model_dump()
    crawled = SourceConfig(name="s", format="warc", paths=("a.warc",))
    assert origin_fields(crawled) == OriginFields(crawl_date_field="warc_date")


def test_a_field_that_is_not_kept_is_refused():
    with pytest.raises(ValidationError, match="license_field=terms is not among metadata_fields; add it there"):
        SourceConfig(name="s", format="jsonl", paths=("a.jsonl",), license_field="terms", metadata_fields=("id",))
