"""Self-attention with grouped key/value heads. Its settings are fields of the model, which several layers share."""

from collections.abc import Mapping
from math import gcd
from typing import Any, ClassVar, Literal, Self

from gristmill.training.config.layers import LayerConfig, divisors
from gristmill.training.config.mixer import Mixer, MixerParameter, MixerSharding, ParameterRole, Share, norm_bytes

NORMS = ("query_norm", "key_norm")
BLOCK = 64  # queries of a block of the CPU's kernel, and its most scores (training/model/attention/attention.py)
MAX_SCORES = 2**25


class AttentionMixer(Mixer):
    """window: tokens that each token attends to, itself included; None: all. rope: whether rotary positions, where the
    model has them, turn queries and keys."""

    symbol: ClassVar[str] = "*"
    module: ClassVar[str] = "gristmill.training.model.attention.attention:GroupedQueryAttention"
    marks_mixing: ClassVar[bool] = True
    carries_state: ClassVar[bool] = False
    attends: ClassVar[bool] = True
    settings_of_model: ClassVar[bool] = True

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rope: bool
    qkv_biases: bool
    output_biases: bool
    qk_norm: bool | Literal["width"]
    norm_leaves: tuple[str, ...]
    rmsnorm: bool
    clip: bool
    softcap: bool

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any], layer: LayerConfig) -> Self:
        return cls(
            heads=model.heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            window=layer.window,
            rope=layer.rope,
            qkv_biases=model.projection_biases,
            output_biases=model.output_biases,
            qk_norm=model.qk_norm,
            norm_leaves=model.norm_leaves,
            rmsnorm=model.has_rmsnorm,
            clip=model.qkv_clip is not None,
            softcap=model.attention_softcap is not None,
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def problem(self, width: int, sequence_length: int) -> str | None:
        if self.heads % self.kv_heads:
            return (
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; try one of {divisors(self.heads)}"
            )
        return None

    def tensor_problem(self, width: int, tensor: int) -> str | None:
        if self.qk_norm == "width" and not self.rmsnorm:
            return "qk_norm: width with a LayerNorm is not built over ranks yet; use norm: rmsnorm"
        if self.heads % tensor:
            return f"{self.heads} heads do not split evenly"
        if self.kv_heads % tensor and tensor % self.kv_heads:
            return f"{self.kv_heads} key/value heads neither split over the ranks nor repeat over them evenly"
        return None

    def parameters(self, width: int) -> tuple[MixerParameter, ...]:
        def linear(name: str, shape: tuple[int, int], sharding: MixerSharding, bias: bool) -> list[MixerParameter]:
            role: ParameterRole = "output" if name == "output" else "hidden"
            parameters = [MixerParameter(f"{name}.weight", shape, sharding, role)]
            of_bias: MixerSharding = "replicated" if sharding == "input" else sharding
            return parameters + [MixerParameter(f"{name}.bias", shape[:1], of_bias, "bias")] * bias

        parameters = linear("query", (self.query_width, width), "output", self.qkv_biases)
        parameters += linear("key", (self.kv_width, width), "key_value", self.qkv_biases)
        parameters += linear("value", (self.kv_width, width), "key_value", self.qkv_biases)
        parameters += linear("output", (width, self.query_width), "input", self.output_biases)
        if self.qk_norm:
            over_heads = self.qk_norm == "width"
            shardings: tuple[MixerSharding, MixerSharding] = ("output", "key_value")
            for name, size, own in zip(NORMS, (self.query_width, self.kv_width), shardings, strict=True):
                shape = (size if over_heads else self.head_dim,)
                sharding: MixerSharding = own if over_heads else "replicated"
                parameters += [MixerParameter(f"{name}.{leaf}", shape, sharding, "norm") for leaf in self.norm_leaves]
        return tuple(parameters)

    def scan_flops(self, width: int, tokens: int) -> float:
        """Scores and their product with the values, 4 x pairs x width of the heads."""
        return 4 * attended_pairs(tokens, self.window, False) * self.query_width

    def causal_flops(self, width: int, tokens: int) -> float:
        return 4 * attended_pairs(tokens, self.window, True) * self.query_width

    def activation_bytes(self, width: int, share: Share) -> float:
        """Query, key, value, the attention's output with its log-sums (or the weights of the CPU's blocks), normed
        queries and keys; under a soft cap as matmuls on the CPU the scores instead."""
        tokens, heads = share.rows * share.tokens, max(1, self.heads // share.tensor)
        query, key_value = self.query_width // share.tensor, self.kv_width // gcd(self.kv_heads, share.tensor)
        # The CPU kernel wants as many key/value heads as query heads, and is given copies; the ring does not.
        keys = 2 * (key_value if share.cuda or share.ring or key_value == query else query)
        total: float = tokens * (2 * query + keys + self.clip * (query + 2 * key_value)) * share.compute
        total += self._softcapped_scores(share)
        blocks = self.block_weights(share)
        total += blocks * share.compute if blocks else tokens * heads * share.statistics
        # The blocks' output is laid out by heads, so the product after it reads a copy.
        total += tokens * query * share.compute if blocks else 0
        if self.window is not None and self.window < share.sequence and not (share.cuda or share.ring):
            total += share.sequence**2 * share.compute  # the mask of the window, which torch turns into numbers
        if self.qk_norm:
            vectors = tokens * (query + key_value) / self.head_dim
            total += norm_bytes(vectors, self.head_dim, share, self.rmsnorm)
        return total

    def whole_bytes(self, width: int, share: Share) -> float:
        """Bytes of those that are no token's own: all but queries, keys and values, their norms and clipped forms. A
        swap by token (training/model/layer_hook.py) moves it whole; queries, keys and values too where attention
        works on copies of them."""
        tokens = share.rows * share.tokens
        query, key_value = self.query_width // share.tensor, self.kv_width // gcd(self.kv_heads, share.tensor)
        own = self.clip * (query + 2 * key_value)
        if self.block_weights(share):
            own += query  # the copy behind the blocks
        else:
            own += query + (2 * key_value if share.cuda or share.ring or key_value == query else 0)
        by_token: float = tokens * own * share.compute
        if self.qk_norm:
            vectors = tokens * (query + key_value) / self.head_dim
            by_token += norm_bytes(vectors, self.head_dim, share, self.rmsnorm)
        return self.activation_bytes(width, share) - by_token

    def block_weights(self, share: Share) -> int:
        """As `block_weights`; 0 with windows and soft caps."""
        return 0 if self.window is not None or self.softcap else block_weights(self.heads, share)

    def _softcapped_scores(self, share: Share) -> float:
        """tanh and softmax in fp32, and in 16 bits the weights as they are multiplied and the factors of the scores in
        fp32. The flex kernels of GPUs and the ring keep none of them."""
        if not self.softcap or share.cuda or share.ring:
            return 0.0
        pairs = share.rows * max(1, self.heads // share.tensor) // share.context * share.sequence**2
        if share.compute == share.statistics:
            return pairs * 2 * share.statistics
        factors = share.rows * share.tokens * 2 * (self.query_width // share.tensor) * share.statistics
        return pairs * (2 * share.statistics + share.compute) + factors

    def state_bytes(self, width: int, share: Share) -> float:
        """Keys and values of all tokens; a window does not free those before it."""
        kv_width = self.kv_width // gcd(self.kv_heads, share.tensor)
        return share.rows * share.tokens * 2 * kv_width * share.compute


def block_weights(heads: int, share: Share) -> int:
    """Attention weights that the CPU's causal blocks keep (training/model/attention/attention.py): each block of 64
    queries attends to the keys up to its end. 0 where a fused kernel or the ring runs: on GPUs, and for many scores."""
    rows, tokens = share.rows * max(1, heads // share.tensor) // share.context, share.sequence
    if share.cuda or share.ring or rows * tokens**2 > MAX_SCORES:
        return 0
    ends = [min(start + BLOCK, tokens) for start in range(0, tokens, BLOCK)]
    return rows * sum((end - start) * end for start, end in zip(range(0, tokens, BLOCK), ends, strict=True))


def attended_pairs(sequence_length: int, window: int | None, causal: bool) -> float:
    """Query-key pairs of one head in one sample. 4 tokens: 16 in full, 10 causally, 7 with a window of 2."""
    if not causal:
        return sequence_length * (sequence_length if window is None else min(window, sequence_length))
    reach = sequence_length if window is None else min(window, sequence_length)
    return reach * (reach + 1) / 2 + (sequence_length - reach) * reach
