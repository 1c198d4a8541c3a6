"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are made from
one narrow vector a token. It and a rotary key that the heads share are all that decoding keeps."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from gristmill.training.config.layers import MAX_WIDTH, LayerConfig, divisors
from gristmill.training.config.mixer import Mixer, MixerParameter, Share, norm_bytes
from gristmill.training.config.mixers.attention import attended_pairs, block_weights

OF_MODEL = ("heads", "head_dim", "rope_width", "norm_leaves", "rmsnorm", "refused")
PLAIN: dict[str, Any] = {  # fields of the model that it is built without
    "positions": "rope",
    "qk_norm": False,
    "qkv_clip": None,
    "attention_softcap": None,
    "window_rope_base": None,
}


class LatentAttentionMixer(Mixer):
    """Latent attention: of a head's model.head_width features the first model.rope_width turn. DeepSeek-V3 has
    head_width 192, rope_width 64 and {key_value_rank: 512, query_rank: 1536, value_width: 128}.

    The last fields are the model's and are not set here. refused: what the model asks for that is not built."""

    symbol: ClassVar[str] = "L"
    module: ClassVar[str] = "gristmill.training.model.attention.latent:MultiHeadLatentAttention"
    widths: ClassVar[tuple[str, ...]] = ("key_value_rank", "query_rank")
    head_widths: ClassVar[tuple[str, ...]] = ("value_width",)
    marks_mixing: ClassVar[bool] = True
    carries_state: ClassVar[bool] = False
    attends: ClassVar[bool] = True

    key_value_rank: int = Field(512, ge=1, le=MAX_WIDTH, description="width of what keys and values are made from")
    query_rank: int = Field(0, ge=0, le=MAX_WIDTH, description="width of what queries are made from; 0: the tokens")
    value_width: int = Field(128, ge=1, le=MAX_WIDTH, description="features of a head's values")
    heads: SkipJsonSchema[int] = 0
    head_dim: SkipJsonSchema[int] = 0
    rope_width: SkipJsonSchema[int] = 0
    norm_leaves: SkipJsonSchema[tuple[str, ...]] = ("weight",)
    rmsnorm: SkipJsonSchema[bool] = True
    refused: SkipJsonSchema[str] = ""

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any], layer: LayerConfig) -> Self:
        for name in OF_MODEL:
            if name in options:
                raise ValueError(f"mixers.latent_attention.{name} follows from the model; leave it out")
        settings = {name: getattr(model, name) for name, plain in PLAIN.items() if getattr(model, name) != plain}
        settings |= {} if model.biases in (False, "mlp") else {"biases": model.biases}
        settings |= {} if layer.window is None else {"window": layer.window}
        refused = [f"model.{name}={value} is not built for it; leave it out" for name, value in settings.items()]
        return cls(
            **options,
            heads=model.heads,
            head_dim=model.head_dim,
            rope_width=model.rope_width,
            norm_leaves=model.norm_leaves,
            rmsnorm=model.has_rmsnorm,
            refused=next(iter(refused), ""),
        )

    @property
    def plain_width(self) -> int:
        """Features of a head that do not turn."""
        return self.head_dim - self.rope_width

    def problem(self, width: int, sequence_length: int) -> str | None:
        if not self.refused and not 0 < self.rope_width < self.head_dim:
            return "a part of each head turns: set model.rope_width, such as 64, below model.head_width, such as 192"
        return self.refused or None

    def tensor_problem(self, width: int, tensor: int) -> str | None:
        if self.heads % tensor:
            return f"{self.heads} heads do not split evenly; try {divisors(self.heads)}"
        return None

    def parameters(self, width: int) -> tuple[MixerParameter, ...]:
        query, rank = self.heads * self.head_dim, self.query_rank
        parameters = [MixerParameter("query.weight", (query, rank or width), "output")]
        if rank:
            parameters = [
                MixerParameter("query_down.weight", (rank, width)),
                *self._norm("query_norm", rank),
                *parameters,
            ]
        parameters.append(MixerParameter("key_value_down.weight", (self.key_value_rank + self.rope_width, width)))
        parameters += self._norm("key_value_norm", self.key_value_rank)
        expanded = self.heads * (self.plain_width + self.value_width)
        parameters.append(MixerParameter("key_value.weight", (expanded, self.key_value_rank), "output"))
        parameters.append(MixerParameter("output.weight", (width, self.heads * self.value_width), "input", "output"))
        return tuple(parameters)

    def _norm(self, name: str, width: int) -> list[MixerParameter]:
        return [MixerParameter(f"{name}.{leaf}", (width,), "replicated", "norm") for leaf in self.norm_leaves]

    def scan_flops(self, width: int, tokens: int) -> float:
        """Scores, and their product with the values."""
        return 2 * attended_pairs(tokens, None, False) * self.heads * (self.head_dim + self.value_width)

    def causal_flops(self, width: int, tokens: int) -> float:
        return 2 * attended_pairs(tokens, None, True) * self.heads * (self.head_dim + self.value_width)

    def activation_bytes(self, width: int, share: Share) -> float:
        """Queries, keys, values and the attention's output with its log-sums; the narrow vectors before and after their
        norms. The CPU's blocks keep their weights, a copy of the output, and copies of the values, where others keep
        what keys and values were cut from."""
        tokens, heads = share.rows * share.tokens, max(1, self.heads // share.tensor)
        ranks = [rank for rank in (self.query_rank, self.key_value_rank) if rank]
        kept: float = tokens * (sum(ranks) + self.rope_width) * share.compute
        kept += sum(norm_bytes(tokens, rank, share, self.rmsnorm) for rank in ranks)
        blocks = block_weights(self.heads, share)
        extra = self.value_width if blocks else self.plain_width
        kept += tokens * heads * (2 * self.head_dim + 2 * self.value_width + extra) * share.compute
        return kept + (blocks * share.compute if blocks else tokens * heads * share.statistics)

    def whole_bytes(self, width: int, share: Share) -> float:
        """Bytes of the attention's output with its log-sums; with the CPU's blocks their weights, and the copies of
        queries, keys and values."""
        tokens, heads = share.rows * share.tokens, max(1, self.heads // share.tensor)
        blocks = block_weights(self.heads, share)
        if not blocks:
            return tokens * heads * (self.value_width * share.compute + share.statistics)
        return (tokens * heads * 2 * (self.head_dim + self.value_width) + blocks) * share.compute

    def state_bytes(self, width: int, share: Share) -> float:
        return share.rows * share.tokens * (self.key_value_rank + self.rope_width) * share.compute
