"""Seconds from a training step to its documents, and from a document to its steps, at 10^12 tokens and 10^9 documents.

The tables are synthetic: lengths of documents, the sorted index of ids and its rows are computed where a run would read
them from the .idx and from ids/*.ids (a few blocks of each). Real are
the code of `gristmill trace`, metrics.jsonl (a line for each of 953,674 steps), and the Parquet shard that the ids of a
step's documents are read from, 1,024 rows a group. No peer answers the question from its files; the peer is a scan of
metrics.jsonl with orjson, which is the least that a log of samples would have to read."""

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from measure import Figure, arguments, print_figures

from gristmill.data_pipeline.corpus.id_index import ID_RECORD, INDEX_VERSION, IdIndex
from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, IndexedSource
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.packing import Concat
from gristmill.data_pipeline.indexed.samples import Samples
from gristmill.pipelines.provenance.trace import DocumentOrder, StepLog, Tracer, samples_of_steps, step_of

DOCUMENTS, TOKENS = 10**9, 10**12
LENGTH, BATCH_TOKENS = 4096, 1 << 20
PERIOD = 1001  # of the lengths, 500 to 1,500 tokens, 1,000 on average
SHARD_ROWS, GROUP_ROWS = 262_144, 1_024
TIMES = 9


class SyntheticIndex:
    """The lengths of an .idx as a formula: document i has 500 + 7919 i mod 1001 tokens."""

    def __init__(self, documents: int):
        lengths = 500 + 7919 * np.arange(PERIOD) % PERIOD
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        self.documents = documents
        periods, rest = divmod(documents, PERIOD)
        self.num_tokens = int(periods * self.ends[-1] + self.ends[rest])

    def token_ranges(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        periods, places = np.divmod(documents, PERIOD)
        base = periods * self.ends[-1]
        return base + self.ends[places], base + self.ends[places + 1]

    def document_at(self, token: int) -> int:
        period, place = divmod(token, int(self.ends[-1]))
        return period * PERIOD + int(np.searchsorted(self.ends, place, side="right")) - 1


class SyntheticTracer(Tracer):
    """A tracer on one source of that index; ids of rows are those of a shard that repeats."""

    def __init__(self, documents: int, shard: Path):
        index: Any = SyntheticIndex(documents)
        source = IndexedSource(name="web", weight=1.0, tokenizer="t", splits={})
        dataset = Dataset(vocab_size=50_000, end_of_document=0, dtype="uint16", fim=None, sources=(source,))
        self.samples = Samples(dataset, {"web": Concat(index, LENGTH, 0)}, LENGTH, 1, IndexConfig(), "synthetic")
        self.sequence_length = LENGTH
        train: Any = SimpleNamespace(tokens=index.num_tokens)
        self.train = train
        order = Permutation(documents, key_of(1, "documents", "web", "train"))
        self.__dict__["orders"] = {"web": DocumentOrder("web", order)}
        self.ids = synthetic_ids(documents)
        shards = linked(shard, -(-documents // SHARD_ROWS))
        ends = list(range(SHARD_ROWS, len(shards) * SHARD_ROWS + 1, SHARD_ROWS))
        self.__dict__["_shards"] = lambda source: (shards, ends)

    def _find(self, doc_id: str) -> tuple[str, int]:
        [place] = self.ids.places(doc_id)
        return "web", place.row


def synthetic_ids(documents: int) -> IdIndex:
    """An index whose i-th id begins with i 2^64 / documents; its rows are a permutation."""
    rows = Permutation(documents, key_of(1, "rows"))

    def read(name: str, start: int, stop: int) -> bytes:
        numbers = np.arange(start // ID_RECORD.itemsize, stop // ID_RECORD.itemsize)
        records = np.zeros(len(numbers), ID_RECORD)
        records["id"][:, 0] = numbers.astype(np.uint64) * np.uint64(2**64 // documents)
        records["row"] = [rows(number) for number in numbers.tolist()]
        return records.tobytes()

    content = {"version": INDEX_VERSION, "tables": ["documents/train/web-00000.parquet"], "records": [documents]}
    return IdIndex.open(orjson.dumps(content), read)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    documents = DOCUMENTS // 1000 if options.quick else DOCUMENTS
    drawn = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tracer = SyntheticTracer(documents, write_shard(folder / "web-00000.parquet"))
        steps = tracer.train.tokens // BATCH_TOKENS
        write_metrics(folder / "metrics.jsonl", steps)
        numbers = [drawn.randrange(1, steps) for _ in range(TIMES)]
        by_step = [timed(lambda number=number: documents_of_step(tracer, folder, number)) for number in numbers]
        ids = [f"{drawn.randrange(documents) * (2**64 // documents):016x}{0:016x}" for _ in range(TIMES)]
        read_by = [timed(lambda doc_id=doc_id: steps_of_document(tracer, folder, doc_id)) for doc_id in ids]
        scan = timed(lambda: sum(orjson.loads(line)["tokens"] > 0 for line in (folder / "metrics.jsonl").open("rb")))[0]
    print(
        f"{documents:,} documents, {tracer.train.tokens:,} tokens, {steps:,} steps; a step read "
        f"{median(count for _, count in by_step):,.0f} pieces of documents, a document is in "
        f"{median(count for _, count in read_by)} samples"
    )
    figures = [("trace_step_seconds", by_step), ("trace_document_seconds", read_by)]
    print_figures(
        [
            Figure(name, seconds, "s", scan, "scan of metrics.jsonl", scan / seconds)
            for name, runs in figures
            for seconds in [median(seconds for seconds, _ in runs)]
        ]
    )


def documents_of_step(tracer: Tracer, folder: Path, step: int) -> int:
    with StepLog(folder) as log:
        return len(tracer.documents_of(samples_of_steps(log, step, step, LENGTH)))


def steps_of_document(tracer: Tracer, folder: Path, doc_id: str) -> int:
    with StepLog(folder) as log:
        samples = tracer.samples_of(doc_id)
        assert all(step_of(log, sample, LENGTH) is not None or sample for _, sample, _ in samples)
        return len(samples)


def timed(function) -> tuple[float, int]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def write_metrics(path: Path, steps: int) -> None:
    with path.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "tokens": step * BATCH_TOKENS, "loss": 2.5, "grad_norm": 0.3}) + "\n")


def write_shard(path: Path) -> Path:
    ids = [f"{key_of('id', row):016x}{row:016x}" for row in range(SHARD_ROWS)]
    pq.write_table(pa.table({"doc_id": ids, "text": ["x"] * SHARD_ROWS}), path, row_group_size=GROUP_ROWS)
    return path


def linked(shard: Path, shards: int) -> list[Path]:
    """The shard under as many names as the corpus has shards."""
    names = [shard.with_name(f"web-{number:05d}.parquet") for number in range(shards)]
    for name in names[1:]:
        name.hardlink_to(shard)
    return names


if __name__ == "__main__":
    main()
