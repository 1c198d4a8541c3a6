"""The claims of the papers on Mamba-2, its hybrid and TCNCA (docs/mixers.md), at a size that one core can repeat.

Time of a mixer against the sequence length, TCNCA's convolutions against FFT convolutions, decoding, and recall:

    python benchmarks/mixers.py
    python benchmarks/mixers.py --parts recall

Bits per byte on a corpus at equal parameters and tokens need a work folder whose stages up to `index` are complete:

    gristmill run tcnca_tiny --to index --workdir DIR
    python benchmarks/mixers.py --parts corpus --data DIR

Each run's result is kept, so a comparison that was stopped goes on where it was.

--parts gpu repeats times and decoding on a GPU where there is one, at 4K to 128K tokens in bfloat16."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support import mixer_corpus, mixer_recall, mixer_timings

from gristmill.training.launch.processes import keep_freed_memory

CPU = torch.device("cpu")


def scaling(quick: bool, device: torch.device = CPU) -> list[Figure]:
    """Forward seconds of single mixers over one row, by length; how their times grow from the first length to the
    last; where attention becomes the slower one."""
    lengths = [1024, 4096] if quick else [1024, 4096, 16_384, 65_536]
    dtype = torch.float32
    if device.type == "cuda":  # each length compiles Mamba-2's scan anew, for half a minute
        lengths, dtype = [4096, 32_768] if quick else [4096, 16_384, 32_768, 65_536, 131_072], torch.bfloat16
    found: dict[str, list[float]] = {}
    for mixer in mixer_timings.MIXERS:
        found[mixer] = []
        for length in lengths:
            found[mixer].append(mixer_timings.forward_seconds(mixer, length, device, dtype))
            print(f"{mixer}: {length:,} tokens in {1000 * found[mixer][-1]:.2f} ms", flush=True)
    table = Table("forward ms by tokens", *(f"{length:,}" for length in lengths))
    for mixer, times in found.items():
        table.add_row(mixer, *(f"{1000 * time:.1f}" for time in times))
    Console(width=120).print(table)
    growth = torch.tensor(lengths[-1] / lengths[0]).log()
    figures = []
    for mixer, times in found.items():
        power = float(torch.tensor(times[-1] / times[0]).log() / growth)
        figures.append(Figure(f"{mixer}_growth{_suffix(device)}", power, "power of the length"))
    for mixer in ("mamba2", "tcnca"):
        place = mixer_timings.crossing(lengths, found["attention"], found[mixer])
        if place is not None:
            figures.append(
                Figure(f"{mixer}_crossing{_suffix(device)}", place, "tokens, from where attention is slower")
            )
        own, other = found[mixer][-1], found["attention"][-1]
        unit = f"ms, {lengths[-1]} tokens"
        name = f"{mixer}_{lengths[-1] // 1024}k{_suffix(device)}"
        figures.append(Figure(name, 1000 * own, unit, 1000 * other, "attention", other / own))
    return figures


def convolution(quick: bool) -> list[Figure]:
    """Three dilated convolutions of 17 taps, 64 channels, against one FFT convolution with a kernel as long as the
    sequence, and against MEGA's moving average, which computes that kernel from its parameters."""
    tokens, rounds = (4096, 3) if quick else (16_384, 9)
    ours, x_BTC = mixer_timings.Convolutions(), torch.randn(1, tokens, mixer_timings.CHANNELS)
    x_BCT = x_BTC.transpose(1, 2).contiguous()
    peers: dict[str, tuple[str, torch.nn.Module]] = {"tcn": ("FFT convolution", mixer_timings.FftConvolution(tokens))}
    peers["ema"] = ("MEGA's moving average", mixer_timings.MovingAverage())
    figures = []
    for name, (title, peer) in peers.items():
        mixer_timings.passes(ours, x_BTC), mixer_timings.passes(peer, x_BCT)
        pairs = [(mixer_timings.passes(ours, x_BTC), mixer_timings.passes(peer, x_BCT)) for _ in range(rounds)]
        for place, direction in enumerate(("forward", "backward")):
            own, other = ([1000 * side[place] for side in sides] for sides in zip(*pairs, strict=True))
            ratio = statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=True))
            figures.append(
                Figure(
                    f"{name}_{direction}",
                    statistics.median(own),
                    f"ms, {tokens} tokens",
                    statistics.median(other),
                    title,
                    ratio,
                    goal=2.0 if name == "tcn" else None,
                )
            )
    return figures


def decoding(quick: bool, device: torch.device = CPU) -> Iterator[Figure]:
    """Tokens a second of one row and bytes of its state, of a hybrid and a transformer of as many parameters."""
    contexts, steps, width = ([1024], 4, 128) if quick else ([4096, 32_768], 24, 256)
    dtype = torch.float32
    if device.type == "cuda":
        contexts, steps, width, dtype = [4096, 32_768] if quick else [4096, 32_768, 131_072], 64, 1024, torch.bfloat16
    for context in contexts:
        both = mixer_timings.decoders(width, context).items()
        sides = {name: mixer_timings.Decoding(config, context, device, dtype) for name, config in both}
        states = {name: side.state_bytes() for name, side in sides.items()}
        for side in sides.values():
            side.step()  # copies the cache to memory with spare capacity
        pairs = [
            [mixer_timings.seconds(sides[name].step, device) for name in ("hybrid", "transformer")]
            for _ in range(steps)
        ]
        own, other = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in pairs)
        label = f"{context // 1024}k{_suffix(device)}"
        yield Figure(f"decoding_{label}", 1 / own, "tokens/s", 1 / other, "transformer", ratio)
        kilobytes = {name: size / 1000 for name, size in states.items()}
        hybrid, transformer = kilobytes["hybrid"], kilobytes["transformer"]
        yield Figure(f"decoding_state_{label}", hybrid, "kB", transformer, "transformer", transformer / hybrid)


def recall(quick: bool) -> list[Figure]:
    """Share of values that each model answers; chance is one in the number of values."""
    figures = []
    steps = 20 if quick else mixer_recall.STEPS
    for task, names in mixer_recall.COMPARISONS:
        models = mixer_recall.models(task)
        for name in names:
            right = mixer_recall.accuracy(task, models[name], steps, seed=1)
            figures.append(Figure(f"{task.title}_{name.replace(' ', '_')}", 100 * right, "% of the values"))
    return figures


def corpus(kept: Path, index: Path, seeds: int, tokens: int | None) -> list[Figure]:
    """Bits per byte with the 95 % confidence interval over seeds."""
    found = mixer_corpus.compare(kept, index, seeds, tokens)
    table = Table("model", "bits per byte", "95 % interval", "of each seed")
    for name, values in found.items():
        each = ", ".join(f"{value:.4f}" for value in values)
        table.add_row(name, f"{statistics.mean(values):.4f}", f"± {mixer_corpus.interval(values):.4f}", each)
    Console(width=120).print(table)
    base = statistics.mean(found["attention"])
    return [
        Figure(
            f"corpus_{name.replace(' ', '_')}",
            statistics.mean(values),
            f"bits/byte ± {mixer_corpus.interval(values):.4f}",
            base,
            "attention",
            base / statistics.mean(values),
        )
        for name, values in found.items()
    ]


def gpu(quick: bool) -> Iterator[Figure]:
    """The same on a GPU; nothing where there is none."""
    if not torch.cuda.is_available():
        print("no GPU: times and decoding on one are unmeasured")
        return
    device = torch.device("cuda")
    yield from decoding(quick, device)
    yield from scaling(quick, device)


def _suffix(device: torch.device) -> str:
    return "" if device.type == "cpu" else "_gpu"


def main() -> None:
    parts: dict[str, Callable[[bool], Iterable[Figure]]] = {
        "scaling": scaling,
        "convolution": convolution,
        "decoding": decoding,
        "recall": recall,
        "gpu": gpu,
    }
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", choices=[*parts, "corpus"], default=list(parts))
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--tokens", type=int, help="of a run on a corpus; the default is the recipe's")
    parser.add_argument("--kept", type=Path, help="folder of the results of runs; the default is mixers in --data")
    options = parser.parse_args()
    if "corpus" in options.parts and options.data is None:
        parser.error("--parts corpus needs --data, a work folder of tcnca_tiny with its index")
    torch.set_num_threads(1)
    keep_freed_memory()  # as the train stage does

    def measured() -> Iterator[Figure]:
        for name in options.parts:
            if name in parts:
                yield from parts[name](options.quick)
        if "corpus" in options.parts:
            tokens = 20 * 2048 if options.quick else options.tokens
            kept = options.kept or options.data / "mixers"
            yield from corpus(kept, options.data / "index", 1 if options.quick else options.seeds, tokens)

    print_figures(measured())


if __name__ == "__main__":
    main()
