"""Configuration of the model: its size and its layers. Without torch."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from gristmill.foundation.config import Config
from gristmill.training.config.layers import (
    GATED,
    MAX_LAYERS,
    MAX_ROPE_BASE,
    MAX_SEQUENCE,
    MAX_WIDTH,
    RMSNORMS,
    LayerConfig,
    Mlp,
    MoeConfig,
    NormOrder,
    OutputConfig,
    RopeScaling,
    Scales,
)
from gristmill.training.config.mixer import (
    NO_MIXER,
    Mixer,
    MixerName,
    MixerOptions,
    Options,
    known_mixer,
    mixer_class,
    pattern_layers,
    pattern_problem,
    pattern_stages,
)

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
    ffn_hidden_size: int = Field(
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
    norm: Literal["rmsnorm", "layernorm", "plain_rmsnorm", "plain_layernorm"] = Field(
        "rmsnorm",
        description="the kind of norm; plain_rmsnorm and plain_layernorm: without parameters (nanochat; OLMo)",
    )
    norm_plus_one: bool = Field(
        False, description="norms multiply by 1 + weight, as Gemma's", json_schema_extra=OMIT_DEFAULT
    )
    norm_epsilon: float = Field(1e-5, gt=0, le=1)
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
    rope_base: float = Field(10000.0, gt=1, le=MAX_ROPE_BASE)
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
        le=MAX_ROPE_BASE,
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
    init_method: Literal["scaled", "normal", "mup"] = Field(
        "scaled", description="scaled: output layers by 1 / sqrt(2 layers), as Megatron; mup: arXiv 2203.03466, table 8"
    )
    init_std: float = Field(0.02, gt=0, le=1)
    embedding_std: float | None = Field(
        None,
        gt=0,
        le=10,
        description="standard deviation of the initial token embedding; null: init_std",
        json_schema_extra=OMIT_DEFAULT,
    )
    zero_outputs: bool = Field(
        False,
        description="matrices that write to the residual stream begin at zero, and so does an untied head (nanochat)",
        json_schema_extra=OMIT_DEFAULT,
    )
    mup_base_width: int = Field(256, ge=1, description="the width at which muP equals the standard form")
    moe: MoeConfig | None = Field(None, description="mixture-of-experts layers; null: all layers have a plain MLP")


# The fields of `transformers` models, whose sizes are in the folder and are not read here.
UNSIZED: dict[str, Any] = {"layers": 1, "width": 1, "heads": 1, "positions": "none"}


def _sized_or_from_a_folder(schema: dict[str, Any]) -> None:
    """The JSON schema asks for the sizes unless `transformers` has a folder."""
    required = schema.pop("required", [])
    schema["anyOf"] = [{"required": required}, {"required": ["transformers"]}]


class ModelConfig(ModelFields):
    """Architecture of a transformer. The defaults are Llama's (arXiv 2302.13971); `learned` positions, `layernorm`,
    `gelu`, biases and tied embeddings together are GPT-2. `mixer`, `mlp`, `window` and `norm_order` take one value for
    all layers, or a pattern that is repeated over them: window [256, 256, null] has full attention in every third
    layer."""

    model_config = ConfigDict(json_schema_extra=_sized_or_from_a_folder)

    @model_validator(mode="before")
    @classmethod
    def the_folder_has_the_sizes(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("transformers") is None:
            return value
        others = sorted(
            name
            for name, given in value.items()
            if name not in ("transformers", "sequence_length", *UNSIZED)
            and (name not in cls.model_fields or given != cls.model_fields[name].get_default(call_default_factory=True))
        )
        if others or any(value.get(name, size) != size for name, size in UNSIZED.items()):
            raise ValueError(
                "transformers: the folder's config.json says what the model is; leave "
                f"{', '.join(others or UNSIZED)} out, only sequence_length may stand beside it"
            )
        return UNSIZED | value

    @field_validator("mixer")
    @classmethod
    def mixers_exist(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (value,) if isinstance(value, str) else value:
            known_mixer(name)
        return value

    @model_validator(mode="after")
    def patterns_fill_the_layers(self) -> Self:
        for name in PATTERNS:
            if isinstance(pattern := getattr(self, name), tuple):
                self._repeats_evenly(name, pattern)
        problem = None if self.pattern is None else pattern_problem(self.pattern, self.layers)
        if problem is None and self.pattern is not None and (self.mixer != "attention" or isinstance(self.mlp, tuple)):
            problem = "pattern names the mixer of each layer; leave mixer out, and give mlp one value"
        if problem is not None:
            raise ValueError(problem)
        if any(layer.mixer == layer.mlp == "none" for layer in self.layer_list):
            raise ValueError("a layer has neither mixer nor mlp; set one of them to another value than none")
        if any(layer.window is not None and layer.window < 1 for layer in self.layer_list):
            raise ValueError("window counts the position itself: it must be at least 1, or null for no limit")
        longest = max((layer.window or 0 for layer in self.layer_list), default=0)
        if longest > self.sequence_length:
            raise ValueError(
                f"window {longest} is longer than sequence_length={self.sequence_length}; set it to "
                f"{self.sequence_length} or less, or to null for no limit"
            )
        return self

    @model_validator(mode="after")
    def mixers_fit(self) -> Self:
        used = self.stateful_mixers
        for layer in dict.fromkeys(self.layer_list):
            if (name := layer.mixer) == NO_MIXER:
                continue
            mixer = self.mixer_named(name, layer)
            if (problem := mixer.problem(self.width, self.sequence_length)) is not None:
                raise ValueError(problem if mixer.settings_of_model else f"mixers.{name}: {problem}")
        if idle := sorted(set(self.mixers) - set(self.used_mixers)):
            raise ValueError(f"mixers.{idle[0]} is set, but no layer has that mixer; leave it out, or set mixer")
        if used and self.attention == "bidirectional":
            raise ValueError(f"mixer {used[0]} sees only the tokens before; set attention: causal")
        return self

    @model_validator(mode="after")
    def heads_fit(self) -> Self:
        if not self.has_attention:
            return self
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one, or set head_width"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope turns pairs, so the head width {self.head_dim} must be even; set head_width")
        return self

    @model_validator(mode="after")
    def positions_fit(self) -> Self:
        if self.rope_width > self.head_dim:
            raise ValueError(f"rope_width={self.rope_width} is more than the head width {self.head_dim}; lower it")
        for name in ("rope_width", "rope_layers", "window_rope_base"):
            if getattr(self, name) and self.positions != "rope":
                raise ValueError(f"{name} needs positions: rope; leave it out")
        if self.position_offset and self.positions != "learned":
            raise ValueError("position_offset needs positions: learned; leave it out")
        has_windows = any(layer.window is not None for layer in self.layer_list)
        if self.attention == "bidirectional" and (self.positions == "alibi" or has_windows):
            raise ValueError("bidirectional attention has neither windows nor alibi; leave them out")
        return self

    @model_validator(mode="after")
    def residual_fits_the_layers(self) -> Self:
        orders = {layer.norm_order for layer in self.layer_list}
        whole = all(layer.mixer != "none" and layer.mlp != "none" for layer in self.layer_list)
        if self.parallel_residual and (orders != {"pre"} or not whole):
            raise ValueError(
                "parallel_residual adds a mixer and an MLP in each layer, behind norms; set norm_order: pre, or leave "
                "it out"
            )
        if self.norm_plus_one and not self.norm_leaves:
            raise ValueError(f"norm_plus_one adds to the weights of norms, and {self.norm} has none; change one")
        if self.qkv_clip is not None and self.qk_norm:
            raise ValueError("qkv_clip and qk_norm are not built together; set one of them")
        if self.attention_softcap is not None and (self.positions == "alibi" or self.attention == "bidirectional"):
            raise ValueError("attention_softcap is built for causal attention without alibi; leave it out")
        return self

    @model_validator(mode="after")
    def output_names_are_unique(self) -> Self:
        if len(set(names := [output.name for output in self.outputs])) < len(names):
            raise ValueError(f"outputs has the names {names}; give each output its own")
        return self

    @model_validator(mode="after")
    def experts_are_legal(self) -> Self:
        for name, pattern in (self.moe.patterns() if self.moe else {}).items():
            self._repeats_evenly(f"moe.{name}", pattern)
        if self.moe and (problem := self.moe.problem(self.layer_list)):
            raise ValueError(problem)
        if self.pattern is not None and self.moe is None and "E" in self.pattern:
            raise ValueError("pattern has layers of experts (E); set moe, such as {experts: 8, top_k: 2}")
        return self

    def _repeats_evenly(self, name: str, pattern: tuple[Any, ...]) -> None:
        if not pattern or self.layers % len(pattern):
            raise ValueError(f"{name} has {len(pattern)} entries, which do not repeat evenly over {self.layers} layers")

    @property
    def layer_list(self) -> tuple[LayerConfig, ...]:
        """One entry a layer: the source of pipeline stages, the planner's costs and the model."""
        return tuple(self.layer(index) for index in range(self.layers))

    def layer(self, index: int) -> LayerConfig:
        return LayerConfig(
            mixer=self.mixer_of(index),
            mlp=self._mlp_of(index),
            window=_entry(self.window, index),
            rope=_entry(self.rope_layers, index) is not False,
            norm_order=_entry(self.norm_order, index),
            **self._widths(index),
        )

    def mixer_of(self, index: int) -> str:
        """The mixer of layer `index`."""
        return _entry(self.mixer, index) if self.pattern is None else pattern_layers(self.pattern)[index].mixer

    def mixer_named(self, name: str, layer: LayerConfig | None = None) -> Mixer:
        """A mixer with its options, in that layer; None: one as any other."""
        return mixer_class(name).of(self, self.mixers.get(name, {}), layer or LayerConfig())

    def _mlp_of(self, index: int) -> Mlp:
        has_mlp = self.pattern is None or pattern_layers(self.pattern)[index].has_mlp
        return _entry(self.mlp, index) if has_mlp else "none"

    @property
    def pattern_splits(self) -> tuple[int, ...] | None:
        """The first layer of each stage but the first, where the pattern has stages."""
        return pattern_stages(self.pattern) if self.pattern is not None and "|" in self.pattern else None

    @property
    def has_attention(self) -> bool:
        return any(mixer_class(name).attends for name in self.used_mixers)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Window of each layer with attention."""
        layers = (layer for layer in self.layer_list if layer.mixer != NO_MIXER)
        return tuple(layer.window for layer in layers if mixer_class(layer.mixer).attends)

    @property
    def used_mixers(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted({self.mixer_of(index) for index in range(self.layers)} - {NO_MIXER}))

    @property
    def stateful_mixers(self) -> tuple[str, ...]:
        """The mixers that carry a state from token to token, which therefore cannot form a tree; sorted."""
        return tuple(name for name in self.used_mixers if mixer_class(name).carries_state)

    @property
    def residual_additions(self) -> int:
        """Mixers and MLPs, each of which adds to the residual stream."""
        return sum((self.mixer_of(index) != "none") + (self._mlp_of(index) != "none") for index in range(self.layers))

    def _widths(self, index: int) -> dict[str, int]:
        mlp = self._mlp_of(index)
        hidden = 0 if mlp == "none" else self.hidden_width(mlp)
        has_experts = self.pattern is None or pattern_layers(self.pattern)[index].has_experts
        experts = 0 if self.moe is None or mlp == "none" or not has_experts else _entry(self.moe.experts, index)
        if self.moe is None or not experts:
            return {"ffn_hidden_size": hidden}
        width = _entry(self.moe.ffn_hidden_size, index) or hidden
        return {
            "ffn_hidden_size": hidden if self.moe.residual else self.moe.shared_experts * width,
            "experts": experts,
            "top_k": _entry(self.moe.top_k, index),
            "expert_ffn_hidden_size": width,
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
        return self.biases not in (False, "mlp")

    @property
    def output_biases(self) -> bool:
        """Whether the attention's output has a bias."""
        return self.biases in (True, "attention")

    @property
    def mlp_biases(self) -> bool:
        return self.biases in (True, "mlp")

    @property
    def norm_leaves(self) -> tuple[str, ...]:
        """The parameters of a norm."""
        return {"rmsnorm": ("weight",), "layernorm": ("weight", "bias")}.get(self.norm, ())

    @property
    def has_rmsnorm(self) -> bool:
        return self.norm in RMSNORMS

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_width or self.width // self.heads

    def hidden_width(self, mlp: Mlp) -> int:
        """Width inside the MLP: the recipe's, or the customary one. width 256, swiglu -> 704."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return 4 * self.width if mlp not in GATED else -(-8 * self.width // (3 * 64)) * 64


def _entry(value: Any, index: int) -> Any:
    return value[index % len(value)] if isinstance(value, tuple) else value
