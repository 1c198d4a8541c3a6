"""Mamba-2 (arXiv 2405.21060): a linear recurrence whose state decays by a number that depends on the token.

Heads of head_width channels; each has a state of head_width x state numbers. B and C are shared by the heads of a
group, as keys and values are in grouped attention."""

import math
from typing import Any, ClassVar

from pydantic import Field

from gristmill.training.config.layers import divisors, nearest
from gristmill.training.config.mixer import FirstTaps, Mixer, MixerParameter, Share

MAX_CHUNK = 65_536
MIN_STEP, MAX_STEP, STEP_FLOOR = 1e-3, 1e-1, 1e-4  # of dt's first values, in the paper's code


class Mamba2(Mixer):
    """Defaults are the paper's; the groups of a model on t tensor ranks must be a multiple of t."""

    symbol: ClassVar[str] = "M"
    module: ClassVar[str] = "gristmill.training.model.ssm.mamba2:Mamba2Mixer"
    widths: ClassVar[tuple[str, ...]] = ("state",)
    marks_mixing: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    not_of_weights: ClassVar[tuple[str, ...]] = ("chunk",)

    expand: int = Field(2, ge=1, le=64, description="inner width / width")
    head_width: int = Field(64, ge=1, le=MAX_CHUNK, description="channels of a head")
    state: int = Field(128, ge=1, le=MAX_CHUNK, description="numbers of state for each channel")
    groups: int = Field(1, ge=1, le=MAX_CHUNK, description="sets of B and C, each shared by the heads of a group")
    kernel: int = Field(4, ge=1, le=64, description="tokens that the causal convolution sees")
    min_step: float = Field(0.0, ge=0, le=1, description="lower bound of the step dt; Nemotron-H has 0.001")
    chunk: int = Field(0, ge=0, le=MAX_CHUNK, description="tokens of a chunk of the scan; 0: 128, or the sequence")

    def inner(self, width: int) -> int:
        return self.expand * width

    def heads(self, width: int) -> int:
        return self.inner(width) // self.head_width

    @property
    def group_width(self) -> int:
        """Width of B and of C."""
        return self.groups * self.state

    def chunk_of(self, tokens: int) -> int:
        return min(self.chunk or 128, tokens)

    def problem(self, width: int, sequence_length: int) -> str | None:
        inner = self.inner(width)
        if inner % self.head_width:
            near = nearest(divisors(inner), self.head_width)
            return f"head_width={self.head_width} does not divide the inner width {inner}; try {near}"
        if self.heads(width) % self.groups:
            near = nearest(divisors(self.heads(width)), self.groups)
            return f"groups={self.groups} does not divide the {self.heads(width)} heads; try {near}"
        if self.chunk and sequence_length % self.chunk:
            near = nearest(divisors(sequence_length), self.chunk)
            return f"chunk={self.chunk} does not divide sequence_length={sequence_length}; try {near}, or 0"
        return None

    def tensor_problem(self, width: int, tensor: int) -> str | None:
        heads = self.heads(width)
        if heads % tensor:
            return f"{heads} heads of mamba2 do not split evenly"
        if self.groups % tensor:
            fitting = [count for count in divisors(heads) if count % tensor == 0]
            return (
                f"{self.groups} groups of mamba2 do not split evenly; set model.mixers.mamba2.groups: "
                f"{nearest(fitting, self.groups)}"
            )
        return None

    def parameters(self, width: int) -> tuple[MixerParameter, ...]:
        inner, heads, shared = self.inner(width), self.heads(width), self.group_width
        outputs = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
        parameters = [MixerParameter(f"{name}.weight", (size, width), "output") for name, size in outputs.items()]
        for name in ("x", "B", "C"):
            size = outputs[name]
            parameters += [
                MixerParameter(
                    f"{name}_convolution.weight", (size, self.kernel), "output", "filter", False, FirstTaps(self.kernel)
                ),
                MixerParameter(f"{name}_convolution.bias", (size,), "output", "bias"),
            ]
        for name, initial in (("A_log", _first_decay), ("D", _ones), ("dt_bias", _first_step)):
            parameters.append(MixerParameter(f"scan.{name}", (heads,), "output", "recurrence", True, initial))
        parameters.append(MixerParameter("norm.weight", (inner,), "output", "norm"))
        parameters.append(MixerParameter("output.weight", (width, inner), "input", "output"))
        return tuple(parameters)

    def scan_flops(self, width: int, tokens: int) -> float:
        """FLOPs of each chunk of q tokens: C B^T (q q state a group), its product with x (q q head_width a head), the
        chunk's state and the product of C with the state before it (q state head_width a head, each)."""
        inner, chunk = self.inner(width), self.chunk_of(tokens)
        return 2.0 * tokens * (chunk * (self.group_width + inner) + 2 * self.state * inner)

    def activation_bytes(self, width: int, share: Share) -> float:
        """By what autograd keeps of the module, for a token. Computed: padded inputs of the convolutions, their
        outputs, the input of the output projection. In statistics: for each chunk the state before it; weights with and
        without scores; ten tensors of the inner width (x three times, weighted by step and by decay, z and its silu, y
        twice, gated and normed), eight of B and C, four numbers a head."""
        inner, heads, shared = (
            size // share.tensor for size in (self.inner(width), self.heads(width), self.group_width)
        )
        groups, chunk = self.groups / share.tensor, self.chunk_of(share.tokens)
        padded = 1 + (self.kernel - 1) / share.tokens
        computed = (padded + 2) * inner + 2 * (padded + 1) * shared
        exact = inner * self.state / chunk + (2 * heads + groups) * chunk + 10 * inner + 8 * shared + 4 * heads + groups
        return share.rows * share.tokens * (computed * share.compute + exact * share.statistics)

    def whole_bytes(self, width: int, share: Share) -> float:
        """Bytes of those, all but z, its silu, the gated and the normed inner width with a number a group, and the
        input of the output projection. In 16 bits the scan's result, which moves whole, is widened by token."""
        inner, groups = self.inner(width) // share.tensor, self.groups / share.tensor
        own = inner * share.compute + (4 * inner + groups) * share.statistics
        if share.compute != share.statistics:
            own += inner * (share.statistics - share.compute)
        return self.activation_bytes(width, share) - share.rows * share.tokens * own

    def context_numbers(self, width: int, tensor: int) -> tuple[float, float]:
        """The last inputs of the convolutions; the state that the run adds, and how much of the one before it keeps."""
        streams = self.inner(width) + 2 * self.group_width
        return (self.kernel - 1) * streams / tensor, self.heads(width) / tensor * (self.head_width * self.state + 1)

    def state_bytes(self, width: int, share: Share) -> float:
        """The last kernel - 1 inputs of the convolutions, and the state, which is float32."""
        inner, shared = self.inner(width) // share.tensor, self.group_width // share.tensor
        return share.rows * (
            (self.kernel - 1) * (inner + 2 * shared) * share.compute + inner * self.state * share.statistics
        )


def _ones(uniform: Any) -> Any:
    return uniform * 0 + 1


def _first_decay(uniform: Any) -> Any:
    """log of A uniform in [1, 16)."""
    return (1 + 15 * uniform).log()


def _first_step(uniform: Any) -> Any:
    """The inverse of softplus at a step that is log-uniform in [1e-3, 1e-1)."""
    low, high = math.log(MIN_STEP), math.log(MAX_STEP)
    step = (low + (high - low) * uniform).exp().clamp(min=STEP_FLOOR)
    return step + (-(-step).expm1()).log()
