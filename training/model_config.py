"""Configuration of the model: its size and its layers. Without torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.training.divisors import divisors
from gristmill.training.limits import MAX_LAYERS, MAX_SEQUENCE, MAX_WIDTH
from gristmill.training.moe_config import MoeConfig
from gristmill.training.rope_config import RopeScaling

Mixer = Literal["attention"]
Mlp = Literal["swiglu", "gelu"]
NormOrder = Literal["pre", "post"]


class LayerConfig(Config):
    """Configuration of one layer. window: number of tokens that each token attends to, itself included; None: all.

    hidden: width of the MLP that all tokens go through; in a mixture, that of its shared experts or of PR-MoE's MLP, 0
    if it has neither. experts: of a mixture, 0 elsewhere; each token goes to top_k of them, each expert_hidden wide."""

    mixer: Mixer = "attention"
    mlp: Mlp = "swiglu"
    hidden: int = 0
    window: int | None = None
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    norm_order: NormOrder = "pre"


class OutputConfig(Config):
    """A linear output beside the vocabulary's. over: of the pooled first token, or of every token."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="by which an objective asks for it")
    size: int = Field(ge=1, le=MAX_WIDTH, description="numbers it gives, such as the classes")
    over: Literal["pooled", "tokens"] = "pooled"


class ModelConfig(Config):
    """Architecture of a transformer. The defaults are Llama's (arXiv 2302.13971); `learned` positions, `layernorm`,
    `gelu`, biases and tied embeddings together are GPT-2. `mixer`, `mlp`, `window` and `norm_order` take one value for
    all layers, or a pattern that is repeated over them: window [256, 256, null] has full attention in every third
    layer."""

    layers: int = Field(ge=1, le=MAX_LAYERS)
    width: int = Field(ge=1, le=MAX_WIDTH)
    heads: int = Field(ge=1, le=MAX_WIDTH)
    kv_heads: int = Field(0, ge=0, le=MAX_WIDTH, description="key/value heads; 0 means as many as heads")
    head_width: int = Field(0, ge=0, le=MAX_WIDTH, description="0 means width / heads")
    hidden: int = Field(
        0, ge=0, le=MAX_WIDTH, description="0 means 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu"
    )
    sequence_length: int = Field(512, ge=1, le=MAX_SEQUENCE, description="tokens of a sample")
    mixer: Mixer | tuple[Mixer, ...] = "attention"
    mlp: Mlp | tuple[Mlp, ...] = "swiglu"
    window: int | tuple[int | None, ...] | None = None
    norm_order: NormOrder | tuple[NormOrder, ...] = "pre"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(1e-5, gt=0)
    attention: Literal["causal", "bidirectional"] = Field(
        "causal", description="bidirectional: every token attends to all tokens of its document, as in BERT"
    )
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    rope_base: float = Field(10000.0, gt=1)
    rope_scaling: RopeScaling | None = Field(
        None, description="rotary positions beyond the length of pretraining, as Llama 3.1 has them"
    )
    biases: bool | Literal["qkv", "attention"] = Field(
        False, description="of all linear layers, of query, key and value (Qwen2), or of the whole attention"
    )
    tied_embeddings: bool = False
    segments: int = Field(
        0, ge=0, le=MAX_WIDTH, description="rows of a table of segment embeddings; BERT has 2, 0: none"
    )
    embedding_norm: bool | Literal["sum"] = Field(
        False,
        description="a norm right after the embedding, as BLOOM has (arXiv 2211.05100); sum: after positions and "
        "segments were added, as the original BERT has",
    )
    final_norm: bool = Field(True, description="a norm after the last layer; the original BERT has none")
    gelu: Literal["tanh", "exact"] = Field("tanh", description="the form of gelu: GPT-2's, or BERT's by erf")
    head_transform: bool = Field(False, description="norm(gelu(x W + b)) before the output table, as BERT has")
    head_bias: bool = Field(False, description="a bias for each token of the vocabulary, as BERT has")
    outputs: tuple[OutputConfig, ...] = Field(
        (), description="linear outputs for the objectives that use them, such as [{name: classes, size: 3}]"
    )
    qk_norm: bool | Literal["width"] = Field(
        False, description="norm of queries and keys: true for each head (Qwen3), width over all heads (OLMoE)"
    )
    logit_softcap: float | None = Field(None, gt=0, description="logits become cap x tanh(logits / cap)")
    dropout: float = Field(0.0, ge=0, lt=1)
    initialisation: Literal["scaled", "normal", "mup"] = Field(
        "scaled", description="scaled: output layers by 1 / sqrt(2 layers), as Megatron; mup: arXiv 2203.03466, table 8"
    )
    init_std: float = Field(0.02, gt=0)
    mup_base_width: int = Field(256, ge=1, description="the width at which muP equals the standard form")
    moe: MoeConfig | None = Field(None, description="mixture-of-experts layers; null: all layers have a plain MLP")

    @model_validator(mode="after")
    def heads_fit(self) -> Self:
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one, or set head_width"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; try one of {divisors(self.heads)}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope turns pairs, so the head width {self.head_dim} must be even; set head_width")
        return self

    @model_validator(mode="after")
    def output_names_are_unique(self) -> Self:
        names = [output.name for output in self.outputs]
        if len(set(names)) < len(names):
            raise ValueError(f"outputs has the names {names}; give each output its own")
        return self

    @model_validator(mode="after")
    def bidirectional_sees_all(self) -> Self:
        if self.attention == "bidirectional" and (
            self.positions == "alibi" or any(layer.window is not None for layer in self.layer_list)
        ):
            raise ValueError("bidirectional attention has neither windows nor alibi; leave them out")
        return self

    @model_validator(mode="after")
    def patterns_fill_the_layers(self) -> Self:
        for name in ("mixer", "mlp", "window", "norm_order"):
            pattern = getattr(self, name)
            if isinstance(pattern, tuple) and (not pattern or self.layers % len(pattern)):
                raise ValueError(
                    f"{name} has {len(pattern)} entries, which do not repeat evenly over {self.layers} layers"
                )
        if any(layer.window is not None and layer.window < 1 for layer in self.layer_list):
            raise ValueError("window counts the position itself: it must be at least 1, or null for no limit")
        return self

    @model_validator(mode="after")
    def experts_are_legal(self) -> Self:
        for name, pattern in (self.moe.patterns() if self.moe else {}).items():
            if self.layers % len(pattern):
                raise ValueError(
                    f"moe.{name} has {len(pattern)} entries, which do not repeat evenly over {self.layers} layers"
                )
        for index, layer in enumerate(self.layer_list if self.moe else ()):
            problem = self.moe.layer_problem(layer.experts, layer.top_k, layer.expert_hidden) if self.moe else None
            if problem is not None:
                raise ValueError(f"moe: layer {index}: {problem}")
        if self.moe and not self.has_experts:
            raise ValueError("moe.experts is 0 in every layer; leave moe out for plain MLPs")
        return self

    @property
    def layer_list(self) -> tuple[LayerConfig, ...]:
        """One entry a layer: the source of pipeline stages, the planner's costs and the model."""
        return tuple(
            LayerConfig(
                mixer=_entry(self.mixer, index),
                mlp=_entry(self.mlp, index),
                window=_entry(self.window, index),
                norm_order=_entry(self.norm_order, index),
                **self._widths(index),
            )
            for index in range(self.layers)
        )

    def _widths(self, index: int) -> dict[str, int]:
        hidden = self.hidden_width(_entry(self.mlp, index))
        if self.moe is None or not (experts := _entry(self.moe.experts, index)):
            return {"hidden": hidden}
        width = _entry(self.moe.hidden, index) or hidden
        return {
            "hidden": hidden if self.moe.residual else self.moe.shared_experts * width,
            "experts": experts,
            "top_k": _entry(self.moe.top_k, index),
            "expert_hidden": width,
        }

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layer_list)

    @property
    def has_pooler(self) -> bool:
        return any(output.over == "pooled" for output in self.outputs)

    @property
    def projection_biases(self) -> bool:
        """Whether query, key and value have biases."""
        return self.biases is not False

    @property
    def output_biases(self) -> bool:
        """Whether the attention's output has a bias."""
        return self.biases in (True, "attention")

    @property
    def mlp_biases(self) -> bool:
        return self.biases is True

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_width or self.width // self.heads

    def hidden_width(self, mlp: Mlp) -> int:
        """Width inside the MLP: the recipe's, or the customary one. width 256, swiglu -> 704."""
        if self.hidden:
            return self.hidden
        return 4 * self.width if mlp == "gelu" else -(-8 * self.width // (3 * 64)) * 64


def _entry(value: Any, index: int) -> Any:
    return value[index % len(value)] if isinstance(value, tuple) else value
