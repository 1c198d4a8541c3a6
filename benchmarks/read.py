"""Reading JSONL.zst and Parquet, compared with a minimal loop over the same library, on one core each.

The bare loops: zstandard's stream, split into lines, orjson.loads, the text taken; and pyarrow's batches, the text
column as Python strings. Ours are the columns that annotation reads; they add numbered records, damaged ones set apart,
fields mapped, metadata kept."""

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from measure import Figure, arguments, in_turn, print_figures
from text import documents

from gristmill.data_pipeline.readers.read import FileRange, read_columns
from gristmill.data_pipeline.readers.source import Format, SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

LIMIT = 1.3  # times the bare loop's time, at most


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    texts = documents(options.data, 8_000_000 if options.quick else 40_000_000)
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as name:
        lines, table = Path(name) / "a.jsonl.zst", Path(name) / "a.parquet"
        raw = b"".join(orjson.dumps({"text": text, "url": f"http://a.b/{k}"}) + b"\n" for k, text in enumerate(texts))
        lines.write_bytes(zstandard.compress(raw))
        columns = {"text": texts, "url": [f"http://a.b/{k}" for k in range(len(texts))]}
        pq.write_table(pa.table(columns), table, compression="zstd", row_group_size=1024)
        print(f"{len(texts)} documents, {len(raw) / 1e6:.1f} MB", file=sys.stderr)
        print_figures(
            [
                figure("read_jsonl_zst", lines, "jsonl", bare_lines, len(raw), rounds),
                figure("read_parquet", table, "parquet", bare_table, len(raw), rounds),
            ]
        )


def figure(name: str, path: Path, kind: Format, bare: Callable[[Path], int], num_bytes: int, rounds: int) -> Figure:
    source = SourceConfig(name="s", format=kind, paths=(str(path),))
    part = FileRange(RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path)), str(path))
    own, other, ratio = in_turn(lambda: ours(part, source), lambda: bare(path), rounds)
    read = [text for batch in read_columns([part], source) for text in batch.texts.texts()]
    if sum(map(len, read)) != bare(path) or ours(part, source) != sum(len(text.encode()) for text in read):
        sys.exit(f"{name}: the two read other texts")
    return Figure(name, num_bytes / 1e6 / own, "MB/s/core", num_bytes / 1e6 / other, "bare loop", ratio, 1 / LIMIT)


def ours(part: FileRange, source: SourceConfig) -> int:
    """Bytes of text, each text with a line end behind it in its batch."""
    return sum(int(batch.texts.offsets[-1]) - len(batch) for batch in read_columns([part], source))


def bare_lines(path: Path) -> int:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return sum(len(orjson.loads(line)["text"]) for line in io.BufferedReader(stream, 1 << 20))


def bare_table(path: Path) -> int:
    batches = pq.ParquetFile(path).iter_batches(1024, columns=["text", "url"])
    return sum(len(row["text"]) for batch in batches for row in batch.to_pylist())


if __name__ == "__main__":
    main()
