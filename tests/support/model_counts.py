"""Parameters and FLOPs counted on the modules: the reference for training/costs."""

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.transformer import Transformer
from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.costs.parameters import Weight, block_weights, embedding_weights, head_weights
from gristmill.training.planner.layout import RankLayers


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


def rank_weights(shape: ModelShape, rank_layers: RankLayers) -> list[Weight]:
    """Every parameter that a pipeline rank holds; a tied table on both ends of one rank once."""
    blocks = [block for block, count in zip(shape.distinct, rank_layers.kinds, strict=True) for _ in range(count)]
    weights = [weight for block in blocks for weight in block_weights(block)]
    weights += embedding_weights(shape) if rank_layers.has_embedding else []
    own_table = not (shape.tied and rank_layers.has_embedding)
    return weights + (head_weights(shape, own_table) if rank_layers.has_head else [])
