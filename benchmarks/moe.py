"""A training step of our mixture of experts against transformers' OLMoE block: the same weights, tokens and optimizer.

Equal outputs are checked in the same run. The peer runs its loop over experts and its grouped matmuls in turn, and the
faster one counts. Two more figures: a step with 8 and with 64 experts of one width and top-k, and the time to generate
a token with DeepSpeed-MoE's 1.3B + MoE-128 against the dense 6.7B that it equals in quality (arXiv 2201.05596, table
2), both an eighth as wide."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Figure, OwnProcess, arguments, cpu_seconds, in_turn, own_seconds, print_figures, wall_seconds
from rich.console import Console
from torch import Tensor, nn
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.config.model import ModelConfig
from gristmill.training.launch.processes import keep_freed_memory
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.model.init import fill, initialize
from gristmill.training.model.moe.mixture import MixtureOfExperts
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.tensor import TensorAxis
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count

# OLMoE-1B-7B (arXiv 2409.02060, table 1) is 2048 wide with 64 experts of 1024, top 8; on a CPU a quarter of that.
ON_CPU = {"width": 512, "ffn_hidden_size": 256, "experts": 64, "top_k": 8, "tokens": 2048}
ON_GPU = {"width": 2048, "ffn_hidden_size": 1024, "experts": 64, "top_k": 8, "tokens": 16384}
PEERS = ("eager", "grouped_mm")


def model_of(shape: dict[str, int], experts: int) -> ModelConfig:
    moe = {"experts": experts, "normalize_gates": False} | {name: shape[name] for name in ("top_k", "ffn_hidden_size")}
    return ModelConfig(layers=1, width=shape["width"], heads=4, sequence_length=shape["tokens"], moe=moe)


def mixture_of(shape: dict[str, int], experts: int, device: torch.device, dtype: torch.dtype) -> MixtureOfExperts:
    mixture = MixtureOfExperts(model_of(shape, experts), 0, TensorAxis(single_process(device), False), 1)
    generator = torch.Generator(device).manual_seed(0)
    fill(mixture, lambda _, value: (0.02 * torch.randn(value.shape, generator=generator, device=device)).to(dtype))
    return mixture


def olmoe_of(mixture: MixtureOfExperts, shape: dict[str, int]) -> OlmoeSparseMoeBlock:
    """transformers' block with the same weights."""
    config = OlmoeConfig(
        hidden_size=shape["width"],
        intermediate_size=shape["ffn_hidden_size"],
        num_experts=mixture.router.experts,
        num_experts_per_tok=shape["top_k"],
        norm_topk_prob=False,
    )
    block = OlmoeSparseMoeBlock(config).to(mixture.router.weight.device, mixture.router.weight.dtype)
    experts = mixture.experts
    with torch.no_grad():
        block.gate.weight.copy_(mixture.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat([experts.gate.weight, experts.up.weight], dim=1))
        block.experts.down_proj.copy_(experts.down.weight)
    return block


class Step:
    """Forward, backward and update of one block; the gradient of its result is a fixed tensor."""

    def __init__(self, block: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor):
        self.block, self.compute, self.x, self.upstream = block, compute, x, upstream
        self.optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> None:
        self.compute(self.x.detach().requires_grad_()).backward(self.upstream)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.x.device.type == "cuda":
            torch.cuda.synchronize()


def inputs(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(4, shape["tokens"] // 4, shape["width"], generator=generator) for _ in range(2)]
    return drawn[0].to(device, dtype), drawn[1].to(device, dtype)


def our_step(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> Step:
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()  # as the stage `train` does
    mixture = mixture_of(shape, shape["experts"], device, dtype)
    return Step(mixture, lambda x: mixture(x), *inputs(shape, device, dtype))


def peer_step(shape: dict[str, int], device: torch.device, dtype: torch.dtype, implementation: str) -> Step:
    if device.type == "cpu":
        torch.set_num_threads(1)
    block = olmoe_of(mixture_of(shape, shape["experts"], device, dtype), shape)
    block.experts.config._experts_implementation = implementation
    return Step(block, block, *inputs(shape, device, dtype))


def check_outputs(shape: dict[str, int], device: torch.device, dtype: torch.dtype, implementation: str) -> None:
    """The peer's block in float32, where rounding changes no choice of an expert, against ours there, and ours in dtype
    against that."""
    mixture = mixture_of(shape, shape["experts"], device, dtype)
    exact = copy.deepcopy(mixture).float()
    block = olmoe_of(exact, shape)
    block.experts.config._experts_implementation = implementation
    x, _ = inputs(shape, device, dtype)
    with torch.no_grad():
        expected = exact(x.float())
        sides = {"the peer's": (block(x.float()), 1e-4), "ours": (mixture(x), 1e-4 if dtype == torch.float32 else 2e-2)}
        for side, (outputs, tolerance) in sides.items():
            difference = (outputs - expected).abs().max() / expected.abs().max()
            if difference > tolerance:
                raise SystemExit(f"{side} outputs differ by {difference:.1e} of the largest")


def compare(shape: dict[str, int], device: torch.device, rounds: int) -> Figure:
    """Each side in a process of its own, since ours sets the allocator."""
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    found = []
    for implementation in PEERS:
        check_outputs(shape, device, dtype, implementation)
        if on_cpu:
            ours, peer = (
                OwnProcess(our_step, shape, device, dtype),
                OwnProcess(peer_step, shape, device, dtype, implementation),
            )
            found.append((*in_turn(ours, peer, rounds, own_seconds), implementation))
            ours.close()
            peer.close()
        else:
            sides = our_step(shape, device, dtype), peer_step(shape, device, dtype, implementation)
            found.append((*in_turn(*sides, rounds, wall_seconds), implementation))
        Console().print(f"moe_step, against {implementation}: {found[-1][2]:.2f}")
    seconds, peer_seconds, ratio, implementation = min(found, key=lambda each: each[2])
    name = f"transformers OLMoE, {implementation}"
    unit = "tokens/s/core" if on_cpu else "tokens/s"
    tokens = shape["tokens"]
    return Figure("moe_step", tokens / seconds, unit, tokens / peer_seconds, name, ratio, 1.5)


def flatness(shape: dict[str, int], device: torch.device, rounds: int) -> Figure:
    """Speed with 64 experts over that with 8, of one width and top-k."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, upstream = inputs(shape, device, dtype)

    def step(experts: int) -> Step:
        mixture = mixture_of(shape, experts, device, dtype)
        return Step(mixture, lambda x: mixture(x), x, upstream)

    _, _, ratio = in_turn(step(64), step(8), rounds, cpu_seconds if device.type == "cpu" else wall_seconds)
    return Figure("moe_flat", ratio, "speed with 64 experts over 8", goal=1 / 1.3)


def gpt(layers: int, width: int, moe: dict[str, Any] | None) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        width=width,
        heads=width // 64,
        sequence_length=256,
        mlp="gelu",
        norm="layernorm",
        positions="learned",
        biases=True,
        tied_embeddings=True,
        moe=moe,
    )


def generator_of(config: ModelConfig, device: torch.device, tokens: int) -> Callable[[], None]:
    """A function that generates so many tokens, one after another, with a cache."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Transformer(config, 8192, single_process(device), options=ComputeOptions(dtype))
    initialize(model, 1, device, dtype)
    causal_lm = LocalCausalLM(model, config.sequence_length)

    def generate() -> None:
        cache, token = causal_lm.new_cache(1), torch.zeros(1, 1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            for index in range(tokens):
                hidden = causal_lm.read(token, SlotRows.of_batch(torch.tensor([[index]]), device), cache)
                token = causal_lm.head(hidden[:, -1]).argmax(dim=-1, keepdim=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return generate


def latency(device: torch.device, rounds: int, quick: bool) -> Figure:
    """Tokens a second of the mixture, one at a time, against the dense model of equal quality."""
    scale, tokens = (4, 8) if quick else (1, 32)
    mixture = gpt(24 // scale, 256, {"experts": [0, 128 // scale], "top_k": 1, "normalize_gates": False})
    dense = gpt(32 // scale, 512, None)
    for name, config in (("mixture", mixture), ("dense", dense)):
        shape = shape_of(config, 8192)
        total, active = parameter_count(shape), active_parameters(shape)
        Console().print(f"moe_latency, {name}: {total / 1e6:.0f} M parameters, {active / 1e6:.0f} M for a token")
    ours, theirs = (generator_of(config, device, tokens) for config in (mixture, dense))
    clock = cpu_seconds if device.type == "cpu" else wall_seconds
    seconds, peer_seconds, ratio = in_turn(ours, theirs, rounds, clock)
    return Figure("moe_latency", tokens / seconds, "tokens/s", tokens / peer_seconds, "dense of equal quality", ratio)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)  # by the processor time of one thread: a busy machine does not change it
    device, shape = (torch.device("cuda"), ON_GPU) if torch.cuda.is_available() else (torch.device("cpu"), ON_CPU)
    if options.quick:
        shape = shape | {"tokens": shape["tokens"] // 2}
    print_figures(measured(shape, device, options.quick))


def measured(shape: dict[str, int], device: torch.device, quick: bool) -> Iterator[Figure]:
    rounds = 3 if quick else 9
    yield latency(device, rounds, quick)
    yield flatness(shape, device, rounds)
    yield compare(shape, device, rounds)


if __name__ == "__main__":
    main()
