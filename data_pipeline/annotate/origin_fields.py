"""Origin of documents as columns of the signals: host, licence and day of the crawl, where the raw data have them."""

import re
from typing import Any

import orjson
import pyarrow as pa

from gristmill.data_pipeline.readers.document import split_url
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.config import Config

ORIGIN_FIELDS = [pa.field("host", pa.string()), pa.field("license", pa.string()), pa.field("crawl_date", pa.string())]
CRAWL_FORMATS = ("warc", "wet", "arc")  # whose records have a date
WARC_DATE = "warc_date"
DAY = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})(?!\d{7})")
MAX_LICENSE_CHARACTERS = 200


class OriginFields(Config):
    """Fields of a record's metadata that name its licence and the day of its crawl. license: of records that name
    none."""

    license: str | None = None
    license_field: str | None = None
    crawl_date_field: str | None = None

    def columns(self, urls: pa.Array, metadata: pa.Array) -> list[pa.Array]:
        """The columns ORIGIN_FIELDS, null where the raw data name nothing."""
        rows = [orjson.loads(row or "{}") for row in metadata.to_pylist()]
        hosts = [split_url(url or "")[0] or None for url in urls.to_pylist()]
        licenses = [_license(row.get(self.license_field)) or self.license for row in rows]
        days = [day_of(row.get(self.crawl_date_field)) for row in rows]
        return [pa.array(values, pa.string()) for values in (hosts, licenses, days)]


def origin_fields(source: SourceConfig) -> OriginFields | None:
    """The origin fields of a source; None where its format has none and the recipe names none."""
    date_field = source.crawl_date_field or (WARC_DATE if source.format in CRAWL_FORMATS else None)
    if source.license is None and source.license_field is None and date_field is None:
        return None
    return OriginFields(license=source.license, license_field=source.license_field, crawl_date_field=date_field)


def _license(value: Any) -> str | None:
    """A licence as text; several are joined with a comma."""
    names = value if isinstance(value, list) else [value]
    texts = [" ".join(name.split()) for name in names if isinstance(name, str)]
    return ", ".join(text for text in texts if text)[:MAX_LICENSE_CHARACTERS] or None


def day_of(value: Any) -> str | None:
    """2014-02-16T05:02:21Z, "2014-02-16 05:02:21" and 20140216050221 -> 2014-02-16; None for what is no date."""
    match = DAY.match(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or not (1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31):
        return None
    return "-".join(match.groups())
