"""Drawing training samples: our `Samples` against Megatron's GPTDataset in a BlendedDataset, on the same files.

`loader_throughput`: tokens per CPU second, samples 0, 1, 2 ... as torch tensors, two sources blended 0.7 : 0.3.
`loader_start`: seconds until the first sample, opened anew; the peer's index files are built first, as in a first run.
`loader_start_1e12`: ours on a sparse dataset of 10^12 tokens; asked for: no more than at 10^8, and under a second.
`loader_memory`: anonymous memory of a process after opening and 1000 samples, less that before.
The peer is needed: pip install --no-deps megatron-core==0.16.1 (extra `bench`)."""

import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from measure import Figure, arguments, in_turn, print_figures

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, IndexedSource, SplitCounts, source_prefix, write_dataset
from gristmill.data_pipeline.indexed.format import HEADER_BYTES, Header, bin_path, idx_path
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.data_pipeline.indexed.writer import indexed_writer

CONTEXT = 2048
WEIGHTS = {"books": 0.7, "notes": 0.3}
VOCABULARY, END = 32_000, 0
DRAWN = 2000


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
            [throughput(data, Path(folder), name), start(data, Path(folder), name), growth(Path(folder)),
             memory(data, Path(folder), name)]
        )  # fmt: skip


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


def ours(folder: Path):
    samples = open_samples(folder, "train", CONTEXT, seed=1, config=IndexConfig())

    def draw(k: int) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(values) for name, values in samples.sample(k).items()}

    return draw


def theirs(folder: Path, cache: Path):
    """A BlendedDataset over GPTDatasets, at its fastest: no attention mask, masks and positions cached."""
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
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
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
    return BlendedDataset(parts, list(WEIGHTS.values()), size, config).__getitem__


def num_windows(folder: Path) -> int:
    return sum(bin_path(source_prefix(folder, "train", name)).stat().st_size for name in WEIGHTS) // (2 * CONTEXT)


def throughput(data: Path, folder: Path, name: str) -> Figure:
    own_draw, their_draw = ours(data), theirs(data, folder / "cache")
    own, other, ratio = in_turn(
        lambda: [own_draw(k)["tokens"] for k in range(DRAWN)],
        lambda: [their_draw(k)["tokens"] for k in range(DRAWN)],
        5,
    )
    tokens = DRAWN * CONTEXT
    return Figure("loader_throughput", tokens / own, "tokens/s/core", tokens / other, name, ratio, goal=2)


def start(data: Path, folder: Path, name: str) -> Figure:
    def first_of_theirs() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        theirs(data, folder / "cache")(0)

    own, other, ratio = in_turn(lambda: ours(data)(0), first_of_theirs, 3)
    return Figure("loader_start", own, "s", other, name, ratio)


def growth(folder: Path) -> Figure:
    """Sparse files: a header, the last entries, and holes. Seconds at 10^12 tokens; at 10^8 and 10^10 on stderr."""
    seconds = {}
    for num_tokens in (10**8, 10**10, 10**12):
        data = folder / f"sparse{num_tokens}"
        for name in WEIGHTS:
            sparse(source_prefix(data, "train", name), num_tokens // 2)
        describe(
            data, [described(name, weight, num_tokens // 2000, num_tokens // 2) for name, weight in WEIGHTS.items()]
        )
        runs = []
        for _ in range(5):
            started = time.perf_counter()
            ours(data)(0)
            runs.append(time.perf_counter() - started)
        seconds[num_tokens] = sorted(runs)[2]
    print(json.dumps({f"{tokens:.0e}": round(value, 5) for tokens, value in seconds.items()}), file=sys.stderr)
    return Figure("loader_start_1e12", seconds[10**12], "s")


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
    """Bytes of anonymous memory that opening and 1000 samples take; a first round has loaded every library."""
    draws = [ours(data) if cache is None else theirs(data, cache)]
    draws[0](0)
    before = anonymous()
    draws.append(ours(data) if cache is None else theirs(data, cache))
    for k in range(1000):
        draws[1](k)
    return anonymous() - before


def anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
