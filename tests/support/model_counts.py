"""Parameters and FLOPs counted on the modules: the reference for training/costs."""

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.transformer import Transformer


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Elements of all parameters, a tied table once."""
    return sum(parameter.numel() for parameter in Transformer(config, vocab_size).parameters())


def matmul_flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """6 for each element of the layers' matrices and of the output table: forward and backward, without attention. Of
    the matrices of experts, for those that a token goes to."""
    model, matrices = Transformer(config, vocab_size), vocab_size * config.width
    for entry, layer in zip(config.layer_list, model.layers.values(), strict=True):
        for name, parameter in layer.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                share = entry.top_k / entry.experts if ".experts." in name else 1
                matrices += round(parameter.numel() * share)
    return 6 * matrices
