"""Weight-only int8 quantization: a quarter of float32's memory, at a cost in score."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.foundation.errors import InputError
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# F outputs, D inputs


class Int8Linear(nn.Module):
    """x W^T + b with W = scale_F x int8_FD: one scale an output, symmetric, rounded to nearest.

    The scale is the row's largest magnitude / 127, so no weight is clipped. Weights only: products are computed in the
    dtype of x (LLM.int8(), arXiv 2208.07339, section 2.1, without its outlier columns)."""

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None):
        super().__init__()
        scale_F = (weight_FD.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).to(weight_FD.dtype)
        self.register_buffer("weight", torch.round(weight_FD / scale_F[:, None]).to(torch.int8))
        self.register_buffer("scale", scale_F)
        self.register_buffer("bias", bias_F)

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return product if self.bias is None else product + self.bias.to(x.dtype)


def quantize_int8(model: Transformer) -> None:
    """Replaces the linear modules of all layers. Embedding, head and norms are not quantized: they are a small share of
    large models and the most sensitive. Raises InputError for a model with experts."""
    if model.config.has_experts:
        raise InputError("int8 weights are not built for experts yet; evaluate with weights: as_trained")
    for layer in model.layers.values():
        for block in (layer.mixer, layer.mlp):
            for name, module in [] if block is None else list(block.named_children()):
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    bias = None if module.bias is None else module.bias.detach()
                    setattr(block, name, Int8Linear(module.weight.detach(), bias))
