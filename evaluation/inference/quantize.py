"""Post-training quantization of a model's linear layers for inference: less memory, at a cost in score.

int8: weights, one scale an output. int4: weights, a scale and an offset for each group of 128 inputs. smoothquant:
weights and activations in 8 bits, with the outliers of the activations moved to the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.evaluation.inference.local_causal_lm import head_of, layers_of
from gristmill.foundation.errors import InputError
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# F outputs, D inputs, G inputs of a group, N tokens

GROUP = 128  # inputs that share a scale (GPTQ, arXiv 2210.17323, section 5)
MIGRATION = 0.5  # SmoothQuant's alpha (arXiv 2211.10438, section 4)
CALIBRATION_ROWS, CALIBRATION_TOKENS = 8, 64
Linear = ColumnParallelLinear | RowParallelLinear


class Int8Linear(nn.Module):
    """x W^T + b with W = scale_F x int8_FD: one scale an output, symmetric, rounded to nearest.

    The scale is the row's largest magnitude / 127, so no weight is clipped. Weights only: products are computed in the
    dtype of x (LLM.int8(), arXiv 2208.07339, section 2.1, without its outlier columns)."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None):
        super().__init__()
        weight, scale = rounded_int8(weight_FD)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias_F)

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return product if self.bias is None else product + self.bias.to(x.dtype)


class Int4Linear(nn.Module):
    """x W^T + b with W = offset + scale x q, q of 0 to 15: a scale and an offset for each output and group of inputs,
    so that the group's smallest and largest weight are exact (round to nearest; GPTQ's and AWQ's baseline).

    Two numbers of 4 bits are stored in a byte; with a float32 scale and offset for 128 of them a weight takes 4.5 bits.
    Products are computed in the dtype of x."""

    packed: Tensor
    scale: Tensor
    offset: Tensor
    bias: Tensor | None

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None):
        super().__init__()
        outputs, self.inputs = weight_FD.shape
        padded = F.pad(weight_FD, (0, -self.inputs % GROUP), mode="replicate") if self.inputs % GROUP else weight_FD
        groups_FGD = padded.unflatten(1, (-1, GROUP))
        low, high = groups_FGD.amin(dim=2, keepdim=True), groups_FGD.amax(dim=2, keepdim=True)
        scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
        quantized = torch.round((groups_FGD - low) / scale).to(torch.uint8).view(outputs, -1)
        self.register_buffer("packed", quantized[:, ::2] | (quantized[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        self.register_buffer("offset", low)
        self.register_buffer("bias", bias_F)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """[F, D]: the weights that the numbers stand for."""
        numbers = torch.stack([self.packed & 15, self.packed >> 4], dim=2).flatten(1).unflatten(1, (-1, GROUP))
        whole = self.offset.to(dtype) + self.scale.to(dtype) * numbers.to(dtype)
        return whole.flatten(1)[:, : self.inputs]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class SmoothQuantLinear(nn.Module):
    """(x / s) (W s)^T + b in integers: each token's x / s and each output's W s are rounded to 8 bits with scales of
    their own, and the product of the integers is exact (SmoothQuant, arXiv 2211.10438, equation 4; its level O1).

    largest_D: the largest magnitude of each input on calibration data; s_D = largest_D^.5 / (largest |W| of D)^.5."""

    smoothing: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None, largest_D: Tensor):
        super().__init__()
        tiny = torch.finfo(torch.float32).tiny
        of_weights = weight_FD.abs().amax(dim=0).clamp(min=tiny)
        smoothing_D = largest_D.clamp(min=1e-5) ** MIGRATION / of_weights ** (1 - MIGRATION)
        weight, scale = rounded_int8(weight_FD * smoothing_D)
        self.register_buffer("smoothing", smoothing_D)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias_F)

    def forward(self, x: Tensor) -> Tensor:
        tokens_ND, token_scale_N = rounded_int8((x / self.smoothing.to(x.dtype)).flatten(0, -2))
        product = torch._int_mm(tokens_ND, self.weight.T).to(x.dtype)
        product = product * token_scale_N[:, None].to(x.dtype) * self.scale.to(x.dtype)
        product = product.unflatten(0, x.shape[:-1])
        return product if self.bias is None else product + self.bias.to(x.dtype)


def rounded_int8(rows_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(int8[N, D], scale[N]): rows = scale x int8, the largest magnitude of a row being 127."""
    scale_N = (rows_ND.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).to(rows_ND.dtype)
    return torch.round(rows_ND / scale_N[:, None]).to(torch.int8), scale_N


def quantize(model: Transformer, weights: str, first_token: int) -> None:
    """Replaces the linear modules of all layers; weights: int8, int4 or smoothquant. Embedding, head and norms are not
    quantized: they are a small share of large models and the most sensitive. first_token begins the texts that the
    model writes for its own calibration. Raises InputError for a model with experts."""
    if model.config.has_experts:
        raise InputError(f"{weights} weights are not built for experts yet; evaluate with quantization: none")
    if weights == "smoothquant":
        largest = largest_inputs(model, own_text(model, first_token))
        _replace(model, lambda linear: SmoothQuantLinear(*_parts(linear), largest[linear]))
    else:
        kind = {"int8": Int8Linear, "int4": Int4Linear}[weights]
        _replace(model, lambda linear: kind(*_parts(linear)))


def _linears(model: Transformer) -> Iterator[tuple[nn.Module, str, Linear]]:
    for layer in layers_of(model):
        for block in (layer.mixer, layer.mlp):
            if block is None:
                continue
            for name, module in list(block.named_children()):
                if isinstance(module, Linear):
                    yield block, name, module


def _replace(model: Transformer, quantized: Callable[[Linear], nn.Module]) -> None:
    for block, name, module in _linears(model):
        setattr(block, name, quantized(module))


def _parts(linear: Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


@torch.inference_mode()
def own_text(model: Transformer, first_token: int) -> Tensor:
    """int64[rows, tokens]: texts that the model writes, drawn with a fixed seed, so that calibration needs no data
    (LLM-QAT, arXiv 2305.17888, section 2.1)."""
    generator = torch.Generator().manual_seed(0)
    device = head_of(model).weight.device
    tokens_BT = torch.full((CALIBRATION_ROWS, 1), first_token, device=device)
    while tokens_BT.shape[1] < min(CALIBRATION_TOKENS, model.config.sequence_length):
        probabilities_BV = model(tokens_BT)[:, -1].double().softmax(dim=-1).cpu()
        drawn_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
        tokens_BT = torch.cat([tokens_BT, drawn_B1.to(device)], dim=1)
    return tokens_BT


def largest_inputs(model: Transformer, tokens_BT: Tensor) -> dict[Linear, Tensor]:
    """The largest magnitude of each input of each linear module over these tokens, float[D]."""
    largest: dict[Linear, Tensor] = {}

    def seen(linear: Linear, inputs: tuple[Tensor, ...]) -> None:
        largest[linear] = inputs[0].detach().abs().flatten(0, -2).amax(dim=0)

    with _hooks([linear.register_forward_pre_hook(seen) for _, _, linear in _linears(model)]), torch.inference_mode():
        model(tokens_BT)
    return {linear: largest_D.clone() for linear, largest_D in largest.items()}


@contextmanager
def _hooks(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
