"""TCNCA (arXiv 2312.05605): a dilated causal convolution of each channel, then attention inside chunks of tokens.

MEGA (arXiv 2209.10655) with its moving average replaced by a temporal convolutional network, whose cost is linear in
the sequence. Only the convolutions see beyond the border of a chunk, so they should see at least a chunk back."""

from typing import ClassVar

from pydantic import Field

from gristmill.training.config.layers import MAX_WIDTH, divisors, nearest
from gristmill.training.config.mixer import FirstTaps, Mixer, MixerParameter, Share

MAX_CHUNK = 65_536


class Tcnca(Mixer):
    """blocks of `depth` convolutions each; those of block i have dilation dilation**i."""

    symbol: ClassVar[str] = "T"
    module: ClassVar[str] = "gristmill.training.model.ssm.tcnca:TcncaMixer"
    widths: ClassVar[tuple[str, ...]] = ("shared",)
    marks_mixing: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    static_shapes: ClassVar[bool] = True

    kernel: int = Field(17, ge=1, le=1024, description="taps of a convolution")
    dilation: int = Field(4, ge=1, le=64, description="growth of the dilation from block to block")
    blocks: int = Field(3, ge=1, le=16, description="residual blocks of convolutions")
    depth: int = Field(2, ge=1, le=16, description="convolutions of a block")
    chunk: int = Field(128, ge=1, le=MAX_CHUNK, description="tokens of a chunk of attention")
    shared: int = Field(0, ge=0, le=MAX_WIDTH, description="width of queries and keys; 0: a quarter of the width")
    expand: int = Field(2, ge=1, le=64, description="width of values / width")
    gated: bool = Field(True, description="the gates of MEGA; false: the paper's simplified form")

    @property
    def dilations(self) -> tuple[int, ...]:
        """Dilations of the convolutions in order: 3 blocks of 2 with growth 4 -> 1, 1, 4, 4, 16, 16."""
        return tuple(self.dilation**block for block in range(self.blocks) for _ in range(self.depth))

    @property
    def receptive_field(self) -> int:
        """Tokens that the convolutions see, the own included: 1 + depth (kernel - 1) sum of dilation**i.

        kernel 17, growth 4, 3 blocks of 2 -> 673."""
        return 1 + (self.kernel - 1) * sum(self.dilations)

    def shared_width(self, width: int) -> int:
        return self.shared or max(1, width // 4)

    def problem(self, width: int, sequence_length: int) -> str | None:
        if sequence_length % self.chunk:
            near = nearest(divisors(sequence_length), self.chunk)
            return f"chunk={self.chunk} does not divide sequence_length={sequence_length}; try {near}"
        if self.receptive_field > MAX_CHUNK:
            return (
                f"the convolutions see {self.receptive_field} tokens, more than {MAX_CHUNK}; lower dilation "
                f"({self.dilation}), blocks ({self.blocks}) or kernel ({self.kernel})"
            )
        return None

    def tensor_problem(self, width: int, tensor: int) -> str | None:
        return f"the {width} channels of tcnca do not split evenly" if width % tensor else None

    def parameters(self, width: int) -> tuple[MixerParameter, ...]:
        shared, values = self.shared_width(width), self.expand * width
        parameters = []
        for index in range(len(self.dilations)):
            name = f"convolutions.{index}"
            parameters.append(
                MixerParameter(
                    f"{name}.weight", (width, self.kernel), "output", "filter", initial=FirstTaps(self.kernel)
                )
            )
            parameters.append(MixerParameter(f"{name}.bias", (width,), "output", "bias"))
        parameters.append(MixerParameter("shared.weight", (shared, width), "input"))
        parameters.append(MixerParameter("shared.bias", (shared,), role="bias"))
        parameters.append(MixerParameter("query_key.weight", (2, shared), role="norm"))
        parameters.append(MixerParameter("query_key.bias", (2, shared), role="bias"))
        parameters.append(MixerParameter("distances.bias", (self.chunk,), role="bias"))
        parameters.append(MixerParameter("value.weight", (values, width), "output"))
        parameters.append(MixerParameter("value.bias", (values,), "output", "bias"))
        if self.gated:
            parameters.append(MixerParameter("reset.weight", (values, width), "output"))
            parameters.append(MixerParameter("reset.bias", (values,), "output", "bias"))
            for name in ("candidate", "update"):
                parameters.append(MixerParameter(f"{name}.weight", (width, width), "input"))
                parameters.append(MixerParameter(f"{name}.bias", (width,), role="bias"))
        parameters.append(MixerParameter("output.weight", (width, values), "input", "output"))
        return tuple(parameters)

    def scan_flops(self, width: int, tokens: int) -> float:
        """Every query of a chunk against every key, and the product with the values."""
        return 2.0 * tokens * self.chunk * (self.shared_width(width) + self.expand * width)

    def activation_bytes(self, width: int, share: Share) -> float:
        """By what autograd keeps of the module for a token, of rows that are one document each. Of the width: padded
        inputs of the convolutions, their results, their sum (of this rank, and of all ranks), and on the tokens of the
        residual stream the candidate, the update gate and their difference. Of queries and keys: the sum, silu of it,
        both. Of values: before and after silu, the same of the reset gate, what was read, the product; or value and
        what was read. Weights of attention, also in statistics, and distances and mask of a chunk."""
        own = share.rows * share.tokens * self._own_numbers(width, share) * share.compute
        return own + self.whole_bytes(width, share)

    def whole_bytes(self, width: int, share: Share) -> float:
        """Bytes of those, the convolutions' and their sum of this rank, what was read, and the weights of attention."""
        tensor, convolutions = share.tensor, len(self.dilations)
        padded = convolutions + (self.receptive_field - 1) / share.tokens
        numbers = (width / tensor * (padded + convolutions + 1 + self.expand) + self.chunk) * share.compute
        if share.statistics != share.compute:
            numbers += self.chunk * share.statistics
        return share.rows * share.tokens * numbers + 9 * self.chunk**2

    def _own_numbers(self, width: int, share: Share) -> float:
        """The others, of a token."""
        tensor = share.tensor
        own = float(width if tensor > 1 else 0) + 4 * self.shared_width(width)
        if self.gated:
            own += 3 * width / (tensor if share.sequence_parallel else 1)
        else:
            own -= width  # only v = V x reads the normed input again
        return own + (5 if self.gated else 1) * self.expand * width / tensor

    def context_numbers(self, width: int, tensor: int) -> tuple[float, float]:
        """The last inputs of every convolution, and keys and values of a chunk."""
        inputs = (self.receptive_field - 1) * width / tensor
        return inputs + self.chunk * (self.shared_width(width) + self.expand * width / tensor), 0.0

    def state_bytes(self, width: int, share: Share) -> float:
        """The inputs that the convolutions still need, keys and values of a chunk, and the position, an int64."""
        inputs = (self.receptive_field - 1) * (width // share.tensor)
        chunk = self.chunk * (self.shared_width(width) + self.expand * width // share.tensor)
        return share.rows * ((inputs + chunk) * share.compute + 8)
