"""The fields of the model's configuration. Without torch."""

from typing import Any, Literal

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.layer_config import Mlp, NormOrder
from gristmill.training.limits import MAX_LAYERS, MAX_SEQUENCE, MAX_WIDTH
from gristmill.training.mixer_registry import MixerName, MixerOptions, Options
from gristmill.training.moe_config import MoeConfig
from gristmill.training.output_config import OutputConfig
from gristmill.training.rope_config import RopeScaling
from gristmill.training.scales_config import Scales

OMIT_DEFAULT: dict[str, Any] = {"omit_default": True}  # such a field is no part of what a run is at its default
PATTERNS = ("mixer", "mlp", "window", "norm_order", "rope_layers")  # fields that take a list, repeated over the layers


class ModelFields(Config):
    """The fields of `ModelConfig`, which checks them."""

    transformers: str | None = Field(
        None,
        description="a folder with config.json and safetensors whose model, of any architecture in transformers, is "
        "trained further; only sequence_length may stand beside it",
        json_schema_extra=OMIT_DEFAULT | {"execution": True},
    )
    layers: int = Field(ge=1, le=MAX_LAYERS)
    width: int = Field(ge=1, le=MAX_WIDTH)
    heads: int = Field(ge=1, le=MAX_WIDTH)
    kv_heads: int = Field(0, ge=0, le=MAX_WIDTH, description="key/value heads; 0 means as many as heads")
    head_width: int = Field(0, ge=0, le=MAX_WIDTH, description="0 means width / heads")
    hidden: int = Field(
        0, ge=0, le=MAX_WIDTH, description="0 means 8/3 x width rounded up to 64 for swiglu and geglu, else 4 x width"
    )
    sequence_length: int = Field(512, ge=1, le=MAX_SEQUENCE, description="tokens of a sample")
    mixer: MixerName | tuple[MixerName, ...] = "attention"
    mlp: Mlp | tuple[Mlp, ...] = "swiglu"
    pattern: str | None = Field(
        None,
        description="one letter a layer, instead of mixer: * attention, M mamba2, T tcnca, - MLP, E mixture of "
        "experts, each alone; | between the stages of a pipeline",
        json_schema_extra=OMIT_DEFAULT,
    )
    mixers: Options = Field(
        default_factory=MixerOptions,
        description="options by mixer, such as {mamba2: {groups: 8}}",
        json_schema_extra=OMIT_DEFAULT,
    )
    window: int | tuple[int | None, ...] | None = None
    norm_order: NormOrder | tuple[NormOrder, ...] = Field(
        "pre",
        description="where the norms are: pre, before mixer and MLP; post, after the addition; output, on what mixer "
        "and MLP return (OLMo 2); sandwich, before and on what they return (Gemma 2)",
    )
    parallel_residual: bool | Literal["one_norm"] = Field(
        False,
        description="mixer and MLP of a layer read the same stream and are added together (GPT-NeoX); one_norm: "
        "through one norm (GPT-J)",
        json_schema_extra=OMIT_DEFAULT,
    )
    norm: Literal["rmsnorm", "layernorm", "plain_layernorm"] = Field(
        "rmsnorm", description="the kind of norm; plain_layernorm: a LayerNorm without parameters (OLMo)"
    )
    norm_plus_one: bool = Field(
        False, description="norms multiply by 1 + weight, as Gemma's", json_schema_extra=OMIT_DEFAULT
    )
    norm_epsilon: float = Field(1e-5, gt=0)
    attention: Literal["causal", "bidirectional"] = Field(
        "causal", description="bidirectional: every token attends to all tokens of its document, as in BERT"
    )
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    position_offset: int = Field(
        0,
        ge=0,
        le=MAX_SEQUENCE,
        description="rows of the table of learned positions before that of the first token; OPT has 2",
        json_schema_extra=OMIT_DEFAULT,
    )
    rope_base: float = Field(10000.0, gt=1)
    rope_width: int = Field(
        0,
        ge=0,
        le=MAX_WIDTH,
        multiple_of=2,
        description="features of a head that rotary positions turn, its first ones; 0: all",
        json_schema_extra=OMIT_DEFAULT,
    )
    rope_layers: tuple[bool, ...] | None = Field(
        None,
        description="layers with rotary positions, a repeated pattern (SmolLM3: [true, true, true, false]); null: all",
        json_schema_extra=OMIT_DEFAULT,
    )
    window_rope_base: float | None = Field(
        None,
        gt=1,
        description="base of the rotary angles in layers with a window, which rope_scaling then leaves alone (Gemma 3)",
        json_schema_extra=OMIT_DEFAULT,
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="rotary positions beyond the length of pretraining, as Llama 3.1 has them"
    )
    biases: bool | Literal["qkv", "attention", "mlp"] = Field(
        False,
        description="of all linear layers, of query, key and value (Qwen2), of the whole attention, or of the MLP",
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
    qkv_clip: float | None = Field(
        None,
        gt=0,
        description="queries, keys and values are cut off at plus and minus this (OLMo)",
        json_schema_extra=OMIT_DEFAULT,
    )
    attention_softcap: float | None = Field(
        None,
        gt=0,
        description="attention scores become cap x tanh(scores / cap) (Gemma 2)",
        json_schema_extra=OMIT_DEFAULT,
    )
    scales: Scales = Field(
        Scales(),
        description="constant factors of embedding, layers and logits (Granite)",
        json_schema_extra=OMIT_DEFAULT,
    )
    logit_softcap: float | None = Field(None, gt=0, description="logits become cap x tanh(logits / cap)")
    dropout: float = Field(0.0, ge=0, lt=1)
    initialisation: Literal["scaled", "normal", "mup"] = Field(
        "scaled", description="scaled: output layers by 1 / sqrt(2 layers), as Megatron; mup: arXiv 2203.03466, table 8"
    )
    init_std: float = Field(0.02, gt=0)
    mup_base_width: int = Field(256, ge=1, description="the width at which muP equals the standard form")
    moe: MoeConfig | None = Field(None, description="mixture-of-experts layers; null: all layers have a plain MLP")
