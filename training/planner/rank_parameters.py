"""Parameters that a rank holds, before the data axis shards them."""

from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.costs.parameters import block_weights, embedding_weights, head_weights, rank_count
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.rank_layers import RankLayers


class RankParameters:
    """Counts on tensor rank 0 of a pipeline rank. They are cached, so that a search is fast."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._counts: dict[tuple[int, RankLayers], int] = {}

    def all(self, layout: Layout, rank_layers: RankLayers) -> int:
        return self.dense(layout.tensor, rank_layers) + self.experts(layout, rank_layers)

    def experts(self, layout: Layout, rank_layers: RankLayers) -> int:
        """Those of experts."""
        if not self.shape.has_experts:
            return 0
        sharding = layout.expert_sharding
        return sum(
            count * sharding.count(block_weights(block))
            for block, count in zip(self.shape.distinct, rank_layers.kinds, strict=True)
            if block.experts
        )

    def dense(self, tensor: int, rank_layers: RankLayers) -> int:
        """Those of all else."""
        key = (tensor, rank_layers)
        if key not in self._counts:
            shape, kv_heads = self.shape, self.shape.model.num_kv_heads
            total = sum(
                count * rank_count(block_weights(block), tensor, 0, kv_heads)
                for block, count in zip(shape.distinct, rank_layers.kinds, strict=True)
            )
            if rank_layers.embeds:
                total += rank_count(embedding_weights(shape), tensor, 0, kv_heads)
            if rank_layers.scores:
                total += rank_count(head_weights(shape, not (shape.tied and rank_layers.embeds)), tensor, 0, kv_heads)
            self._counts[key] = total
        return self._counts[key]
