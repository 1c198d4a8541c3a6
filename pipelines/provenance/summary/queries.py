"""SQL of every number in the papers about a work folder. Each query runs in plain DuckDB with the work folder as the
current directory; `domain_of_host` is a table of the Public Suffix List's registered domains."""

from dataclasses import dataclass, replace

# Share of the domains, by size, that the Commission's template lists; small providers may list less.
LISTED_SHARE, SMALL_LISTED_SHARE, SMALL_LISTED = 0.10, 0.05, 1_000
HOST = r"lower(regexp_extract(url, '^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?([^/?#:]+)', 1))"
SIGNALS = "read_parquet('curate/signals/*/*.parquet', filename = true, union_by_name = true)"
OF_FILE = (
    "regexp_extract(filename, 'signals/[^/]+/(.+)-[0-9]+[.]parquet', 1) AS source, "
    "regexp_extract(filename, 'signals/([^/]+)/', 1) AS split"
)
COUNTS = (
    "read_json('curate/counts.json', columns = {sources: 'MAP(VARCHAR, STRUCT(languages MAP(VARCHAR, "
    "STRUCT(documents BIGINT, removed MAP(VARCHAR, BIGINT)))))'}, maximum_object_size = 1000000000)"
)
LOCK = "read_json('lock.json', maximum_object_size = 1000000000)"


@dataclass(frozen=True)
class Query:
    """about: what its rows are. reads: globs of the files it reads, below the work folder; the first one's stage has to
    be complete. columns: of the signals, without any of which the query is left out."""

    name: str
    about: str
    sql: str
    reads: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        """The stage whose folder has the first file; "" for lock.json."""
        folder, slash, _ = self.reads[0].partition("/")
        return folder if slash else ""


HOSTS = Query(
    "hosts",
    "hosts of documents",
    f"SELECT DISTINCT {HOST} AS host FROM read_parquet('curate/documents/train/*.parquet') WHERE url <> '' ORDER BY 1",
    ("curate/documents/train/*.parquet",),
)

QUERIES = (
    Query(
        "raw_files",
        "raw files of each source and list, as the lock pins them",
        "SELECT s.name AS source, len(s.files) AS files, "
        "CAST(list_sum(list_transform(s.files, lambda file: file.bytes)) AS BIGINT) AS bytes "
        f"FROM (SELECT unnest(sources) AS s FROM {LOCK}) ORDER BY ALL",
        ("lock.json",),
    ),
    Query(
        "documents",
        "documents kept and bytes of their text, by source and split",
        f"SELECT {OF_FILE}, count(*) AS documents, CAST(sum(num_bytes) AS BIGINT) AS bytes "
        f"FROM {SIGNALS} GROUP BY ALL ORDER BY ALL",
        ("curate/signals/*/*.parquet",),
    ),
    Query(
        "languages",
        "documents of the training split and bytes of their text, by detected language",
        "SELECT coalesce(detected_language, '') AS language, count(*) AS documents, "
        "CAST(sum(num_bytes) AS BIGINT) AS bytes FROM read_parquet('curate/signals/train/*.parquet', "
        "union_by_name = true) GROUP BY ALL ORDER BY bytes DESC, language",
        ("curate/signals/train/*.parquet",),
    ),
    Query(
        "domains",
        "the top domain names of each source by bytes of text in the training split: 10 % of them, at least one",
        f"SELECT * FROM (SELECT source, domain, count(*) AS documents, CAST(sum(strlen(text)) AS BIGINT) AS bytes FROM "
        f"(SELECT source, text, {HOST} AS host FROM read_parquet('curate/documents/train/*.parquet') WHERE url <> '') "
        "JOIN domain_of_host USING (host) GROUP BY source, domain) QUALIFY row_number() OVER (PARTITION BY source "
        "ORDER BY bytes DESC, domain) <= ceil({share} * count(*) OVER (PARTITION BY source)){most} ORDER BY source, "
        "bytes DESC, domain",
        ("curate/documents/train/*.parquet",),
    ),
    Query(
        "num_domains",
        "domain names of each source in the training split",
        f"SELECT source, count(DISTINCT domain) AS domains, count(*) AS documents FROM (SELECT source, {HOST} AS host "
        "FROM read_parquet('curate/documents/train/*.parquet') WHERE url <> '') JOIN domain_of_host USING (host) "
        "GROUP BY ALL ORDER BY ALL",
        ("curate/documents/train/*.parquet",),
    ),
    Query(
        "outcomes",
        "documents read, by what became of them",
        "SELECT source, outcome, coalesce(step, '') AS step, coalesce(rule, '') AS rule, count(*) AS documents, "
        "CAST(coalesce(sum(bytes), 0) AS BIGINT) AS bytes FROM read_parquet('curate/ledger/*.parquet') "
        "GROUP BY ALL ORDER BY ALL",
        ("curate/ledger/*.parquet",),
    ),
    Query(
        "reserved",
        "documents that a reservation of rights removed, by source and detected language, of those that were read",
        "SELECT s.key AS source, l.key AS language, l.value.documents AS documents, r.key AS rule, r.value AS removed "
        f"FROM (SELECT unnest(map_entries(sources)) AS s FROM {COUNTS}), unnest(map_entries(s.value.languages)) "
        "AS t(l), unnest(map_entries(l.value.removed)) AS u(r) WHERE split_part(r.key, '.', 1) IN ('robots', "
        "'opt_outs', 'blocked_urls') ORDER BY ALL",
        ("curate/counts.json",),
    ),
    Query(
        "licenses",
        "documents of the training split by the licence that their source or record names",
        f"SELECT source, license, count(*) AS documents, CAST(sum(num_bytes) AS BIGINT) AS bytes FROM (SELECT "
        f"{OF_FILE}, coalesce(license, '') AS license, num_bytes FROM {SIGNALS}) "
        "WHERE split = 'train' GROUP BY ALL ORDER BY ALL",
        ("curate/signals/*/*.parquet",),
        ("license",),
    ),
    Query(
        "crawl_dates",
        "first and last day on which documents of the training split were acquired, and of how many a day is known",
        f"SELECT source, min(crawl_date) AS first, max(crawl_date) AS last, count(crawl_date) AS dated, "
        f"count(*) AS documents FROM (SELECT {OF_FILE}, crawl_date FROM {SIGNALS}) WHERE split = 'train' GROUP BY ALL "
        "ORDER BY ALL",
        ("curate/signals/*/*.parquet",),
        ("crawl_date",),
    ),
    Query(
        "robots",
        "kept documents of the training split by what robots.txt says of their address (null: none is known)",
        f"SELECT source, robots_disallowed, count(*) AS documents, CAST(sum(num_bytes) AS BIGINT) AS bytes FROM "
        f"(SELECT {OF_FILE}, robots_disallowed, num_bytes FROM {SIGNALS}) WHERE split = 'train' GROUP BY ALL "
        "ORDER BY ALL",
        ("curate/signals/*/*.parquet",),
        ("robots_disallowed",),
    ),
    Query(
        "tokens",
        "tokens of each source and split",
        "SELECT s.name AS source, p.key AS split, p.value.documents AS documents, p.value.tokens AS tokens, "
        "p.value.bytes AS bytes FROM (SELECT unnest(sources) AS s FROM read_json('index/dataset.json', columns = "
        "{sources: 'STRUCT(name VARCHAR, splits MAP(VARCHAR, STRUCT(documents BIGINT, tokens BIGINT, bytes "
        "BIGINT)))[]'}, maximum_object_size = 1000000000)), unnest(map_entries(s.splits)) AS t(p) ORDER BY ALL",
        ("index/dataset.json",),
    ),
    Query(
        "model",
        "parameters, training tokens and steps, and the last step's loss",
        "SELECT metadata.parameters AS parameters, metadata.tokens AS tokens, metadata.step AS steps, "
        "metadata.loss AS loss FROM read_json('train/manifest.json')",
        ("train/manifest.json",),
    ),
    Query(
        "scores",
        "scores of the last checkpoint",
        "SELECT s.task AS task, s.metric AS metric, s.score AS score, s.error AS error, s.chance AS chance FROM "
        "(SELECT unnest(metadata.scores) AS s FROM read_json('evaluate/manifest.json')) ORDER BY ALL",
        ("evaluate/manifest.json",),
    ),
)


def queries(is_small: bool) -> list[Query]:
    """All queries. is_small: lists as many domains as small and medium-sized enterprises must, 5 % or 1,000 of them."""
    share, most = LISTED_SHARE, ""
    if is_small:
        most = f" AND row_number() OVER (ORDER BY bytes DESC, domain) <= {SMALL_LISTED}"
        share = SMALL_LISTED_SHARE
    return [replace(query, sql=query.sql.replace("{share}", str(share)).replace("{most}", most)) for query in QUERIES]
