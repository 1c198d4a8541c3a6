"""Times of single mixers, of TCNCA's convolutions and their FFT peers, and of decoding."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.model.init import cast, initialize
from gristmill.training.model.ssm.convolution import CausalConvolution
from gristmill.training.model.ssm.mamba2 import Mamba2State
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.tensor import TensorAxis
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count

WIDTH = 128
KERNEL, DILATIONS = 17, (1, 4, 16)  # 337 tokens seen
CHANNELS = 64
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {},
    "mamba2": {"mamba2": {"state": 64}},
    "tcnca": {"tcnca": {"chunk": 128}},
}


def layer_of(
    mixer: str, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Transformer, Callable[[], Tensor]]:
    """(the model of one layer, a forward pass of the layer's mixer over one row of so many tokens)."""
    config = ModelConfig(
        layers=1,
        width=WIDTH,
        heads=2,
        mlp="none",
        mixer=mixer,
        sequence_length=tokens,
        positions="none",
        mixers=MIXERS[mixer],
    )
    model = Transformer(config, 2)
    initialize(model, 0, torch.device("cpu"), torch.float32)
    model = cast(model, device, dtype)
    x_BTD = torch.randn(1, tokens, WIDTH, device=device, dtype=dtype)
    metadata = model.attention_metadata(x_BTD)
    return model, lambda: model.layers["0"].mixer(x_BTD, metadata)[0]


@torch.no_grad()
def forward_seconds(mixer: str, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Of one forward pass, the median of as many as take about a second, three at most."""
    _, run = layer_of(mixer, tokens, device, dtype)
    once = seconds(run, device)
    if once > 1:
        return once
    return sorted(seconds(run, device) for _ in range(3))[1]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """On the clock; of a GPU, until it has done its work."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def crossing(lengths: list[int], slow: list[float], fast: list[float]) -> float | None:
    """The length at which `slow` begins to take longer than `fast`, interpolated between two lengths as a power; None
    if it does at none of them. [1, 2, 4], [1, 4, 16], [4, 4, 4] -> 2."""
    for place in range(1, len(lengths)):
        ratios = slow[place - 1] / fast[place - 1], slow[place] / fast[place]
        if ratios[0] < 1 <= ratios[1]:
            share = torch.tensor(1 / ratios[0]).log() / torch.tensor(ratios[1] / ratios[0]).log()
            return float(lengths[place - 1] * (lengths[place] / lengths[place - 1]) ** share)
    return None


class Convolutions(nn.Module):
    """TCNCA's convolutions of one channel each, one after another: [B, T, C] -> [B, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        axis = TensorAxis(single_process(), sequence_parallel=False)
        self.layers = nn.ModuleList(CausalConvolution(axis, CHANNELS, KERNEL, each) for each in DILATIONS)
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.2, 0.2)

    def forward(self, x_BTC: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTC = layer(x_BTC, None, None)
        return x_BTC


class FftConvolution(nn.Module):
    """y = k * x with a kernel as long as the sequence, by FFTs of twice its length: [B, C, T] -> [B, C, T], the order
    of dimensions that the FFT reads fastest."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.kernel_CT = nn.Parameter(torch.randn(CHANNELS, tokens) / tokens**0.5)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return fft_convolution(x_BCT, self.kernel_CT)


def fft_convolution(x_BCT: Tensor, kernel_CT: Tensor) -> Tensor:
    tokens = x_BCT.shape[-1]
    product = torch.fft.rfft(x_BCT, n=2 * tokens) * torch.fft.rfft(kernel_CT, n=2 * tokens)
    return torch.fft.irfft(product, n=2 * tokens)[..., :tokens]


class MovingAverage(nn.Module):
    """MEGA's damped exponential moving average in `size` dimensions of each channel (arXiv 2209.10655, section 3.1):
    h_t = p b x_t + (1 - p d) h_(t-1), y_t = n h_t, p and d in (0, 1), as an FFT convolution with the kernel
    k_t = sum of n p b (1 - p d)^t. [B, C, T] -> [B, C, T]."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.p, self.d, self.b, self.n = (nn.Parameter(torch.randn(CHANNELS, size) / 4) for _ in range(4))

    def kernel(self, tokens: int) -> Tensor:
        p_CN, d_CN = torch.sigmoid(self.p), torch.sigmoid(self.d)
        powers_CNT = torch.exp(torch.log1p(-p_CN * d_CN).unsqueeze(-1) * torch.arange(tokens))
        return torch.einsum("cn,cnt->ct", p_CN * self.b * self.n, powers_CNT)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return fft_convolution(x_BCT, self.kernel(x_BCT.shape[-1]))


def passes(module: nn.Module, x: Tensor) -> tuple[float, float]:
    """(forward seconds, backward seconds) of one pass, with gradients of input and parameters."""
    x = x.clone().requires_grad_()
    started = time.perf_counter()
    y = module(x)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    return middle - started, time.perf_counter() - middle


def decoders(width: int, context: int) -> dict[str, ModelConfig]:
    """A transformer of 7 layers, and a hybrid in the proportions of the 8B (6 Mamba-2, 1 attention, 7 MLPs) with as
    many parameters: its MLPs are narrower."""
    shape = {"width": width, "heads": width // 64, "positions": "none", "mlp": "gelu", "sequence_length": context}
    hybrid = {"layers": 14, "pattern": "M-M-M-*-M-M-M-", "mixers": {"mamba2": {"state": 64}}}
    transformer = {"layers": 14, "pattern": "*-" * 7}

    def count(fields: dict[str, Any], hidden: int) -> int:
        return parameter_count(shape_of(ModelConfig.model_validate(shape | fields | {"ffn_hidden_size": hidden}), 512))

    wanted = count(transformer, 4 * width)
    spare = wanted - count(hybrid, width)
    return {
        "transformer": ModelConfig.model_validate(shape | transformer | {"ffn_hidden_size": 4 * width}),
        "hybrid": ModelConfig.model_validate(shape | hybrid | {"ffn_hidden_size": width + spare // (7 * 2 * width)}),
    }


class Decoding:
    """A model that continues one row of `context` tokens, greedily. Its cache holds zeros for them: the time of a step
    does not depend on their values."""

    def __init__(self, config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype = torch.float32):
        model = Transformer(config, 512)
        initialize(model, 0, torch.device("cpu"), torch.float32)
        self.causal_lm = LocalCausalLM(cast(model, device, dtype), config.sequence_length)
        self.cache, self.context, self.length = self.causal_lm.new_cache(1), context, context
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        hidden_BTD = self.causal_lm.read(self.token, self._rows(), self.cache)
        self.token = self.causal_lm.head(hidden_BTD[:, -1]).argmax(dim=-1, keepdim=True)
        self.length += 1

    def state_bytes(self) -> int:
        """Of the context's tokens, without spare capacity."""
        states = [state for state in self.cache.states(self._rows()) if isinstance(state, Mamba2State)]
        kept = sum(state.scan_BHPN.nbytes + sum(part.nbytes for part in state.inputs) for state in states)
        return self.context * self.causal_lm.slot_token_bytes() + kept

    def _rows(self) -> SlotRows:
        return SlotRows.of_batch(torch.tensor([[self.length]]), self.causal_lm.device)
