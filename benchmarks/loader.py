"""Reading training samples: our `Samples` compared with Megatron's GPTDataset in a BlendedDataset, on the same files.

`loader_throughput`: tokens per CPU second in batches of 8 as torch tensors, two sources blended 0.7 : 0.3; the peer's
samples are collated by torch's default_collate, as its DataLoader does. `_masked`: the same where positions restart
behind each document and its last token is not learned from; `_best_fit`: best_fit packing with document masks, ours
alone.
`loader_first_batch`: seconds until the first batch, opened anew; the peer's index files are built first, as in a first
run.
`loader_start_1e12`: ours on a sparse dataset of 10^12 tokens and 10^9 documents whose check is remembered; asked for:
no more than at 10^8, and under a second. `loader_start_best_fit_1e9`: the same with best_fit, whose table is kept.
`loader_check`: what the one check of a first start reads, .idx and .bin: its tables and digests, in GB per CPU second.
`loader_check_tables`: the .idx alone, in documents per CPU second; `loader_pack`: the table of best_fit, likewise.
`loader_memory`: anonymous memory of a process after opening and 1000 samples, less that before.
The peer is needed: pip install --no-deps megatron-core==0.16.1 (extra `bench`)."""

import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from measure import Figure, arguments, cpu_seconds, in_turn, print_figures, wall_seconds
from torch.utils.data import default_collate

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import (
    Dataset,
    IndexedSource,
    SplitCounts,
    checked_state,
    record_path,
    source_prefix,
    write_dataset,
)
from gristmill.data_pipeline.indexed.format import (
    HEADER_BYTES,
    Header,
    IndexedReader,
    bin_path,
    idx_path,
    indexed_writer,
)
from gristmill.data_pipeline.indexed.packing import first_windows, num_groups, table_path, write_table
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.foundation.checksums import write_cached
from gristmill.foundation.manifest import StageIdentity, write_manifest
from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.objective import Causal, NoOptions, ObjectiveInputs, collate

CONTEXT = 2048
WEIGHTS = {"books": 0.7, "notes": 0.3}
VOCABULARY, END = 32_000, 0
DRAWN, BATCH = 2000, 8


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    try:
        import megatron.core  # optional extra `bench`
    except ImportError:
        sys.exit("loader: megatron-core is absent; pip install --no-deps megatron-core==0.16.1")
    num_tokens = 10**7 if options.quick else 10**8
    name = f"megatron-core {megatron.core.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write(data, num_tokens)
        print_figures(
            [
                *throughput(data, Path(folder), name),
                first_batch(data, Path(folder), name),
                *growth(Path(folder)),
                *checks(data, Path(folder), 10**6 if options.quick else 10**7),
                memory(data, Path(folder), name),
            ]
        )


def write(folder: Path, num_tokens: int) -> None:
    """Random documents of lognormal length, about 700 tokens in the mean."""
    rng = np.random.default_rng(0)
    sources = []
    for name, weight in WEIGHTS.items():
        lengths = np.maximum(2, rng.lognormal(6, 1, int(weight * num_tokens / 665))).astype(np.int64)
        with indexed_writer(source_prefix(folder, "train", name), np.dtype(np.uint16), VOCABULARY) as writer:
            for part in np.array_split(lengths, 20):
                tokens = rng.integers(1, VOCABULARY, part.sum(), dtype=np.uint16)
                tokens[np.cumsum(part) - 1] = END
                writer.add_many(tokens, part)
        sources.append(described(name, weight, len(lengths), int(lengths.sum())))
    describe(folder, sources)


def described(name: str, weight: float, documents: int, tokens: int) -> IndexedSource:
    counts = SplitCounts(documents=documents, tokens=tokens, bytes=2 * tokens, sha256="")
    return IndexedSource(name=name, weight=weight, tokenizer="none", splits={"train": counts})


def describe(folder: Path, sources: list[IndexedSource]) -> None:
    write_dataset(
        folder,
        Dataset(vocab_size=VOCABULARY, end_of_document=END, dtype="uint16", fim=None, sources=tuple(sources)),
    )


def ours(folder: Path, packing: str = "concat", mask_documents: bool = False):
    config = IndexConfig(packing=packing, mask_documents=mask_documents)
    model = ModelConfig(layers=1, width=1, heads=1, positions="none", sequence_length=CONTEXT)
    samples = open_samples(folder, "train", CONTEXT, seed=1, config=config)
    objective = Causal(ObjectiveInputs(samples, model, VOCABULARY, END, 0, mask_documents), NoOptions())
    return partial(collate, objective)


def theirs(folder: Path, cache: Path, mask_documents: bool = False):
    """A BlendedDataset over GPTDatasets in its fastest setting: no attention mask; masks and positions cached unless
    documents are masked."""
    from megatron.core.datasets.blended_dataset import BlendedDataset  # optional extra `bench`
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    if not torch.distributed.is_initialized():  # it asks for its rank before it writes its index files
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    tokenizer = SimpleNamespace(eod=END, pad=-1, vocab_size=VOCABULARY, unique_identifiers={"name": "none"})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=CONTEXT,
        split="100,0,0",
        blend=([str(source_prefix(folder, "train", name)) for name in WEIGHTS], list(WEIGHTS.values())),
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=mask_documents,
        reset_attention_mask=False,
        eod_mask_loss=mask_documents,
        create_attention_mask=False,
    )
    size = max(2 * DRAWN, num_windows(folder))  # one epoch
    parts = []
    for name, weight in WEIGHTS.items():
        prefix = str(source_prefix(folder, "train", name))
        indexed = IndexedDataset(prefix, mmap=True)
        documents = np.arange(indexed.document_indices.shape[0] - 1, dtype=np.int32)
        wanted = int(size * weight * 1.005) + 1
        parts.append(GPTDataset(indexed, prefix, documents, wanted, Split.train, config))
    blended = BlendedDataset(parts, list(WEIGHTS.values()), size, config)
    return lambda numbers: default_collate([blended[k] for k in numbers])


def num_windows(folder: Path) -> int:
    return sum(bin_path(source_prefix(folder, "train", name)).stat().st_size for name in WEIGHTS) // (2 * CONTEXT)


def throughput(data: Path, folder: Path, name: str) -> list[Figure]:
    tokens = DRAWN * CONTEXT
    batches = [range(first, first + BATCH) for first in range(0, DRAWN, BATCH)]
    figures = []
    for suffix, masked, goal in (("", False, 6), ("_masked", True, None)):
        own_draw, their_draw = ours(data, mask_documents=masked), theirs(data, folder / f"cache{suffix}", masked)
        own, other, ratio = in_turn(partial(each, own_draw, batches), partial(each, their_draw, batches), 5)
        figures.append(
            Figure(f"loader_throughput{suffix}", tokens / own, "tokens/s/core", tokens / other, name, ratio, goal)
        )
    packed = ours(data, "best_fit", mask_documents=True)
    seconds = sorted(cpu_seconds(lambda: each(packed, batches)) for _ in range(5))[2]
    return [*figures, Figure("loader_throughput_best_fit", tokens / seconds, "tokens/s/core")]


def each(draw: Callable[[range], dict[str, torch.Tensor]], batches: list[range]) -> None:
    for numbers in batches:
        draw(numbers)


def first_batch(data: Path, folder: Path, name: str) -> Figure:
    def first_of_theirs() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        theirs(data, folder / "cache")(range(BATCH))

    own, other, ratio = in_turn(lambda: ours(data)(range(BATCH)), first_of_theirs, 3)
    return Figure("loader_first_batch", own, "s", other, name, ratio)


def growth(folder: Path) -> list[Figure]:
    """Sparse files: a header, the last entries, and holes, noted as checked, with a table as if packed.

    Seconds at 10^12 tokens; at 10^8 and 10^10 on stderr."""
    seconds: dict[tuple[str, int], float] = {}
    for num_tokens in (10**8, 10**10, 10**12):
        data = folder / f"sparse{num_tokens}"
        for name in WEIGHTS:
            sparse(source_prefix(data, "train", name), num_tokens // 2)
        describe(
            data, [described(name, weight, num_tokens // 2000, num_tokens // 2) for name, weight in WEIGHTS.items()]
        )
        for name in WEIGHTS:
            note_as_checked(data, name, num_tokens // 2000)
        for packing, numbers in (
            ("concat", range(1)),
            ("best_fit", range(0)),
        ):  # windows of best_fit would read lengths that are holes
            runs = sorted(wall_seconds(partial(first, data, packing, numbers)) for _ in range(5))
            seconds[packing, num_tokens] = runs[2]
    print(json.dumps({f"{p} {n:.0e}": round(value, 5) for (p, n), value in seconds.items()}), file=sys.stderr)
    return [
        Figure("loader_start_1e12", seconds["concat", 10**12], "s"),
        Figure("loader_start_best_fit_1e9", seconds["best_fit", 10**12], "s"),
    ]


def first(folder: Path, packing: str, numbers: range) -> None:
    draw = ours(folder, packing)
    if numbers:
        draw(numbers)


def note_as_checked(folder: Path, name: str, documents: int) -> None:
    """What a first start leaves behind: the note of the check, and a table of best_fit with 1,600 windows a group."""
    state = checked_state(folder, "train", name, VOCABULARY, None)
    write_cached(record_path(folder, "train", name), state)
    path = table_path(folder, state["files"][f"{name}.idx"], CONTEXT)
    write_table(path, np.arange(num_groups(documents) + 1, dtype=np.int64) * 1600)


def checks(data: Path, folder: Path, documents: int) -> list[Figure]:
    """The check of a first start against a manifest, and its two parts that grow with the number of documents."""
    write_manifest(data, StageIdentity("index", 1), {}, {})
    num_bytes = sum(path.stat().st_size for path in (data / "train").iterdir())

    def first_start() -> None:
        shutil.rmtree(data / "cache", ignore_errors=True)
        ours(data)

    first_start()
    whole = statistics.median(cpu_seconds(first_start) for _ in range(3))
    prefix = folder / "many"
    with indexed_writer(prefix, np.dtype(np.uint16), VOCABULARY) as writer:
        lengths = np.random.default_rng(1).integers(1, 1000, documents)
        for part in np.array_split(lengths, 100):
            writer.add_many(np.full(part.sum(), 7, dtype=np.uint16), part)
    tables = statistics.median(cpu_seconds(lambda: IndexedReader(prefix)) for _ in range(3))
    reader = IndexedReader(prefix)
    first_windows(reader, CONTEXT)
    packing = cpu_seconds(lambda: first_windows(reader, CONTEXT))
    return [
        Figure("loader_check", num_bytes / 1e9 / whole, "GB/s/core"),
        Figure("loader_check_tables", documents / tables, "documents/s/core"),
        Figure("loader_pack", documents / packing, "documents/s/core"),
    ]


def sparse(prefix: Path, num_tokens: int, document_tokens: int = 1000) -> None:
    documents = num_tokens // document_tokens
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * num_tokens)
    with idx_path(prefix).open("wb") as file:
        file.write(Header(np.dtype(np.uint16), documents, documents + 1).pack())
        file.truncate(HEADER_BYTES + 4 * documents + 8 * documents + 8 * (documents + 1))
        file.seek(HEADER_BYTES + 4 * (documents - 1))
        file.write(np.array([document_tokens], "<i4").tobytes())
        file.seek(HEADER_BYTES + 4 * documents + 8 * (documents - 1))
        file.write(np.array([2 * document_tokens * (documents - 1)], "<i8").tobytes())
        file.seek(HEADER_BYTES + 4 * documents + 8 * documents + 8 * documents)
        file.write(np.array([documents], "<i8").tobytes())


def memory(data: Path, folder: Path, name: str) -> Figure:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        own = pool.apply(grown, (data, None))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply(grown, (data, folder / "cache"))
    return Figure("loader_memory", own / 1e6, "MB", other / 1e6, name, other / max(own, 1))


def grown(data: Path, cache: Path | None) -> int:
    """Bytes of anonymous memory that opening and 1000 samples take, after a first round that loads every library."""
    draws = [ours(data) if cache is None else theirs(data, cache)]
    draws[0](range(1))
    before = anonymous()
    draws.append(ours(data) if cache is None else theirs(data, cache))
    for k in range(1000):
        draws[1](range(k, k + 1))
    return anonymous() - before


def anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
