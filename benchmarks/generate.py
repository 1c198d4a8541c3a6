"""Generated tokens per second, compared with transformers.generate on the same weights and requests.

`generation_mixed`: prompts and continuations of 8 to 512 tokens; `generation_equal`: all of one length. transformers
has the best of its caches and batch sizes, with prompts of similar length side by side; a batch goes on to its longest
continuation. Both are greedy and must give the same tokens before anything is printed. Processor seconds on a CPU; on a
GPU, where there is one, a larger model, and seconds on the clock. There the host starts each kernel of each token, of
both sides: about 10 ms a token with 64 rows, so that all figures take five minutes; --longest 128 --rounds 1 takes one.

`generation_by_transformers`: the same for a model that transformers' own code runs, in our continuous batch.

`speculation_ngram`, `speculation_model`: tokens a second of one request with guessed tokens, beside the same without.

`first_token` and `between_tokens`: milliseconds of one request alone; the second beside the time in which memory can
deliver the weights once, its limit."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Figure, arguments, cpu_seconds, in_turn, print_figures, wall_seconds
from transformers import AutoModelForCausalLM

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.drafts import Drafting
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.transformers_causal_lm import load_transformers_causal_lm
from gristmill.training.auto_tp.transformers_folder import open_causal_folder
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize, place_decoding_weights
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import single_process

VOCABULARY = 4096
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS = {
    "cpu": ModelConfig(layers=6, width=256, heads=8, kv_heads=4, sequence_length=1024),  # 6.8 M parameters
    "cuda": ModelConfig(layers=12, width=768, heads=12, kv_heads=4, sequence_length=1024),  # 81 M
}
MODEL = MODELS[DEVICE.type]
CLOCK = cpu_seconds if DEVICE.type == "cpu" else wall_seconds  # each call ends with tokens in host memory
# With a static cache on a GPU transformers compiles its model anew for each shape of a batch, for minutes.
CACHES = {"cpu": ("dynamic", "static"), "cuda": ("dynamic",)}[DEVICE.type]
BATCH_SIZES = {"cpu": (8, 32), "cuda": (32, 64)}
SHORTEST, LONGEST = 8, 512
REQUESTS = {False: 64, True: 12}  # by --quick
LIMITS = BatchLimits(32 if DEVICE.type == "cpu" else 64)


@dataclass(frozen=True)
class Work:
    """One figure: prompts, and how many tokens each is continued by."""

    figure: str
    prompts: list[list[int]]
    new_tokens: list[int]
    goal: float

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)

    def first(self, count: int) -> "Work":
        return Work(self.figure, self.prompts[:count], self.new_tokens[:count], self.goal)


class NoText:
    """A decoder without text: tokens are compared."""

    end_of_document = -1
    ends: tuple[int, ...] = (-1,)

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--speculation", action="store_true", help="the figures of guessed tokens alone")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt and continuation")
    parser.add_argument("--rounds", type=int, help="of which the medians are")
    options = parser.parse_args()
    longest = options.longest or (96 if options.quick else LONGEST)
    rounds = options.rounds or (1 if options.quick else 3)
    print_figures(measured_figures(longest, rounds, REQUESTS[options.quick], options.speculation))


def measured_figures(longest: int, rounds: int, requests: int, guessed_alone: bool) -> Iterator[Figure]:
    model = Transformer(MODEL, VOCABULARY)
    initialize(model, seed=0, device=DEVICE, dtype=torch.float32)
    if guessed_alone:
        place_decoding_weights(model)
        yield from speculation(LocalCausalLM(model, MODEL.sequence_length), longest, rounds)
        return
    with tempfile.TemporaryDirectory() as name:
        write_huggingface(Path(name), model, end_of_document=0)
        peer: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="sdpa")
        peer.to(DEVICE)
        peer.generation_config.eos_token_id = None
        peer.generation_config.pad_token_id = 0
        by_transformers, _ = load_transformers_causal_lm(
            open_causal_folder(Path(name)), single_process(DEVICE), torch.float32, VOCABULARY
        )
    place_decoding_weights(model)  # as in a model that is loaded
    ours = LocalCausalLM(model, MODEL.sequence_length)
    yield from latency(ours, longest // 4)
    for work in reversed(works(requests, longest)):
        yield measured(work, ours, peer, rounds)
    [mixed, _] = works(requests // 2, longest // 2)
    yield measured(replace(mixed, figure="generation_by_transformers", goal=1.0), by_transformers, peer, rounds)
    yield from speculation(ours, longest, rounds)


def works(count: int, longest: int) -> list[Work]:
    rng = np.random.default_rng(0)

    def prompts(lengths: np.ndarray) -> list[list[int]]:
        return [rng.integers(1, VOCABULARY, length).tolist() for length in lengths]

    mixed = np.exp(rng.uniform(np.log(SHORTEST), np.log(longest), (2, count))).astype(int)
    half = np.full(count, longest // 4)
    return [
        Work("generation_mixed", prompts(mixed[0]), mixed[1].tolist(), 2.5),
        Work("generation_equal", prompts(half), half.tolist(), 1.3),
    ]


def measured(work: Work, ours: CausalLM, peer: Any, rounds: int) -> Figure:
    cache, size = best_peer(work, peer)
    theirs = partial(transformers_tokens, peer, work, cache, size)
    mine = partial(our_tokens, ours, work)
    agree(mine(), theirs())
    our_seconds, peer_seconds, ratio = in_turn(mine, theirs, rounds, CLOCK)
    name = f"transformers.generate, {cache} cache, batch size {size}"
    return Figure(
        work.figure,
        work.tokens / our_seconds,
        "tokens/s",
        work.tokens / peer_seconds,
        name,
        ratio=ratio,
        goal=work.goal,
    )


def latency(model: LocalCausalLM, length: int) -> list[Figure]:
    """Of a prompt and a continuation of `length` tokens each; medians."""
    first, between = [], []
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist()
        batch = ContinuousBatch(model, NoText(), BatchLimits(1))
        batch.add(GenerationRequest(tuple(prompt), GenerationSettings(length)))
        times = []
        while not batch.is_idle:
            start = time.perf_counter()
            batch.step()
            times.append(1000 * (time.perf_counter() - start))
        # the first step reads the prompt and decodes once
        between += times[1:]
        first.append(times[0] - statistics.median(times[1:]))
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    limit = 1000 * weights / read_bytes_per_second()
    name = "weights / memory bandwidth"
    found = statistics.median(between)
    return [
        Figure("first_token", statistics.median(first), "ms"),
        Figure("between_tokens", found, "ms", limit, name, ratio=limit / found),
    ]


def speculation(ours: LocalCausalLM, length: int, rounds: int) -> Iterator[Figure]:
    """One request at a time, with guesses and without. How many are right depends on the text: this model has random
    weights, and its text repeats."""
    draft = Transformer(ModelConfig(**{**MODEL.model_dump(exclude_defaults=True), "layers": 1}), VOCABULARY)
    initialize(draft, seed=0, device=DEVICE, dtype=torch.float32)
    place_decoding_weights(draft)
    kinds = {"ngram": Drafting(8), "model": Drafting(4, LocalCausalLM(draft, MODEL.sequence_length))}
    prompts = np.random.default_rng(5).integers(1, VOCABULARY, (3, 32)).tolist()
    work = Work("", prompts, [length] * 3, 1.0)
    for name, drafting in kinds.items():
        limits = BatchLimits(1, drafting=drafting)
        agree(our_tokens(ours, work, limits), our_tokens(ours, work, BatchLimits(1)))
        guessed, plain, ratio = in_turn(
            partial(our_tokens, ours, work, limits), partial(our_tokens, ours, work, BatchLimits(1)), rounds, CLOCK
        )
        right = f"one by one; {accepted_share(ours, work, limits):.0%} of the guesses right"
        yield Figure(f"speculation_{name}", work.tokens / guessed, "tokens/s", work.tokens / plain, right, ratio)


def accepted_share(model: CausalLM, work: Work, limits: BatchLimits) -> float:
    batch = ContinuousBatch(model, NoText(), limits)
    for prompt, count in zip(work.prompts, work.new_tokens, strict=True):
        batch.add(GenerationRequest(tuple(prompt), GenerationSettings(count)))
    while not batch.is_idle:
        batch.step()
    return batch.speculation.accepted_tokens / max(1, batch.speculation.guessed_tokens)


def read_bytes_per_second() -> float:
    """How fast memory is read: the sum of 256 MiB on a CPU and of 4 GiB on a GPU, the best of five."""
    values = torch.ones(2**26 if DEVICE.type == "cpu" else 2**30, device=DEVICE)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        values.sum().item()
        times.append(time.perf_counter() - start)
    return values.nbytes / min(times)


def our_tokens(model: CausalLM, work: Work, limits: BatchLimits = LIMITS) -> list[list[int]]:
    batch = ContinuousBatch(model, NoText(), limits)
    for prompt, count in zip(work.prompts, work.new_tokens, strict=True):
        batch.add(GenerationRequest(tuple(prompt), GenerationSettings(count)))
    found: dict[int, list[int]] = {}
    while not batch.is_idle:
        for result in batch.step():
            found[result.number] = list(result.generations[0].tokens)
    return [found[number] for number in range(len(work.prompts))]


@torch.inference_mode()
def transformers_tokens(model: Any, work: Work, cache: str, size: int) -> list[list[int]]:
    """Batches of prompts of similar length; how long a continuation gets is not known before."""
    order = sorted(range(len(work.prompts)), key=lambda index: -len(work.prompts[index]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        width = max(len(work.prompts[index]) for index in batch)
        tokens, seen = torch.zeros(2, len(batch), width, dtype=torch.long).unbind()
        for row, index in enumerate(batch):
            prompt = work.prompts[index]
            tokens[row, width - len(prompt) :], seen[row, width - len(prompt) :] = torch.tensor(prompt), 1
        made = model.generate(
            tokens.to(DEVICE),
            attention_mask=seen.to(DEVICE),
            max_new_tokens=max(work.new_tokens[index] for index in batch),
            do_sample=False,
            cache_implementation=cache,
        )
        for row, index in enumerate(batch):
            found[index] = made[row, width : width + work.new_tokens[index]].tolist()
    return [found[index] for index in range(len(order))]


def best_peer(work: Work, model: Any) -> tuple[str, int]:
    """The fastest cache and batch size on half of the requests, after two of them to warm up."""
    part, seconds = work.first(max(8, len(work.prompts) // 2)), {}
    transformers_tokens(model, work.first(2), CACHES[0], 2)
    for cache in CACHES:
        for size in BATCH_SIZES[DEVICE.type]:
            seconds[cache, size] = CLOCK(partial(transformers_tokens, model, part, cache, size))
    return min(seconds, key=lambda choice: seconds[choice])


def agree(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """Raises AssertionError where a token differs."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert list(mine) == list(other), (index, mine[:8], other[:8])


if __name__ == "__main__":
    main()
