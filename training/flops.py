"""Operations a token costs, and what the device could do in the time: model FLOP utilisation (PaLM, arXiv 2204.02311,
appendix B). Recomputation does not count; attention counts in full, not causally halved, as published figures do."""

import torch

from gristmill.training.config import ModelConfig
from gristmill.training.model.transformer import Transformer

# Dense bf16 matrix peaks in FLOP/s, from the makers' data sheets (the sparse figures are twice these).
BF16_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Forward and backward: 6 for each matrix element a token meets, and 12 x query width x tokens looked at a
    layer."""
    query, key = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = vocab_size * config.width
    attention = 0
    for layer in config.layer_list:
        matrices += 2 * config.width * (query + key)
        matrices += (2 if layer.channel == "gelu" else 3) * config.width * config.hidden_width(layer.channel)
        attention += query * min(layer.window or config.context, config.context)
    return 6.0 * matrices + 12.0 * attention


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Elements of all parameters, a tied table once."""
    return sum(parameter.numel() for parameter in Transformer(config, vocab_size).parameters())


def device_peak(device: torch.device) -> float | None:
    """bf16 FLOP/s of one device, None where no data sheet says."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAKS.items() if key in name), None)
