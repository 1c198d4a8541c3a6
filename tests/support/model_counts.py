"""Parameters and FLOPs counted on the modules: the reference for training/costs."""

from gristmill.training.model.transformer import Transformer
from gristmill.training.model_config import ModelConfig


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Elements of all parameters, a tied table once."""
    return sum(parameter.numel() for parameter in Transformer(config, vocab_size).parameters())


def matmul_flops_per_token(config: ModelConfig, vocab_size: int) -> int:
    """6 for each element of the layers' matrices and of the output table: forward and backward, without attention."""
    layers = Transformer(config, vocab_size).layers.parameters()
    matrices = sum(parameter.numel() for parameter in layers if parameter.dim() == 2)
    return 6 * (matrices + vocab_size * config.width)
