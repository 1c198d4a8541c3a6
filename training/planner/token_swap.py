"""The share of the tokens whose activations a layer swaps to host memory (MEMO, SIGMOD 2025): as large as the link
hides behind a layer's forward pass and host memory holds; the others are recomputed."""

from dataclasses import dataclass
from typing import Literal

from gristmill.training.planner.hardware import GIB


@dataclass(frozen=True)
class SwapBytes:
    """Bytes that one layer keeps of one micro-batch on one rank. always: its input and the attention's output, which go
    to host memory whole; others: of the other activations."""

    always: float = 0.0
    others: float = 0.0

    def of_share(self, share: float) -> float:
        return self.always + share * self.others


@dataclass(frozen=True)
class SwapPlan:
    """share: of the tokens. bound: what keeps it from being larger. link_share, host_share: the largest by each, below
    0 or above 1 where it is no limit."""

    share: float
    bound: Literal["link", "host memory", "all tokens"]
    link_share: float
    host_share: float
    host_bytes: float
    layer_seconds: float

    def sentence(self) -> str:
        limit = {
            "link": "what the link copies while a layer computes",
            "host memory": "host memory",
            "all tokens": "nothing: all tokens are swapped",
        }[self.bound]
        return (
            f"The activations of {self.share:.0%} of the tokens go to host memory ({self.host_bytes / GIB:.1f} GiB of "
            f"a GPU's share), the others are recomputed; the limit is {limit} (a layer's forward pass takes "
            f"{self.layer_seconds:.3g} s; by the link {self.link_share:.0%}, by host memory {self.host_share:.0%})."
        )


def solve_share(
    sizes: SwapBytes, swapped_layers: float, layer_seconds: float, bytes_per_second: float, host_bytes: float
) -> SwapPlan:
    """max share: always + share x others <= bytes_per_second x layer_seconds, swapped_layers times it <= host_bytes.

    swapped_layers: layers of the rank, times the micro-batches that are alive. Where not even `always` is hidden or
    fits, the share is 0, and the copies show, or `host_bytes` of the plan exceeds what there is."""
    link = (bytes_per_second * layer_seconds - sizes.always) / sizes.others
    host = (host_bytes / max(swapped_layers, 1e-9) - sizes.always) / sizes.others
    share = max(0.0, min(1.0, link, host))
    bound: Literal["link", "host memory", "all tokens"] = "all tokens"
    if share < 1:
        bound = "link" if link < host else "host memory"
    return SwapPlan(share, bound, link, host, swapped_layers * sizes.of_share(share), layer_seconds)


def hidden_from_tokens(width: int, attention_factor: float, tflops: float, gb_per_second: float) -> float:
    """Sequence length from which a full swap hides behind a layer's forward pass, for a GPT layer with 4 width hidden.

    The layer keeps 16 s h numbers, 32 s h bytes in 16 bits, and computes 24 s h^2 + attention_factor s^2 h FLOPs (2 if
    causal attention skips what it masks, else 4): 32 s h / B = (24 s h^2 + a s^2 h) / F, so s = (32 F / B - 24 h) / a.
    At tensor size t both sides are divided by t."""
    return max(0.0, (32 * tflops * 1e12 / (gb_per_second * 1e9) - 24 * width) / attention_factor)
