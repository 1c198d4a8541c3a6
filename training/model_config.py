"""Configuration of the model: its size and its layers. Without torch."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config
from gristmill.training.divisors import divisors
from gristmill.training.layer_pattern import pattern_layers, pattern_problem, pattern_stages
from gristmill.training.limits import MAX_LAYERS, MAX_SEQUENCE, MAX_WIDTH
from gristmill.training.mixer import Mixer
from gristmill.training.mixer_registry import BUILT_IN, MixerName, MixerOptions, Options, known_mixer, mixer_class
from gristmill.training.moe_config import MoeConfig
from gristmill.training.output_config import OutputConfig
from gristmill.training.rope_config import RopeScaling

Mlp = Literal["swiglu", "gelu", "relu2", "none"]
NormOrder = Literal["pre", "post"]
OMIT_DEFAULT: dict[str, Any] = {"omit_default": True}  # such a field is no part of what a run is at its default


class LayerConfig(Config):
    """Configuration of one layer. mixer, mlp: none where the layer has only the other. window: number of tokens that
    each token attends to, itself included; None: all.

    hidden: width of the MLP that all tokens go through; in a mixture, that of its shared experts or of PR-MoE's MLP, 0
    if it has neither. experts: of a mixture, 0 elsewhere; each token goes to top_k of them, each expert_hidden wide."""

    mixer: str = "attention"
    mlp: Mlp = "swiglu"
    hidden: int = 0
    window: int | None = None
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    norm_order: NormOrder = "pre"


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
        0, ge=0, le=MAX_WIDTH, description="0 means 8/3 x width rounded up to 64 for swiglu, else 4 x width"
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

    @field_validator("mixer")
    @classmethod
    def mixers_exist(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (value,) if isinstance(value, str) else value:
            known_mixer(name)
        return value

    @model_validator(mode="after")
    def patterns_fill_the_layers(self) -> Self:
        for name in ("mixer", "mlp", "window", "norm_order"):
            pattern = getattr(self, name)
            if isinstance(pattern, tuple) and (not pattern or self.layers % len(pattern)):
                raise ValueError(
                    f"{name} has {len(pattern)} entries, which do not repeat evenly over {self.layers} layers"
                )
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
        for name in used:
            problem = self.mixer_named(name).problem(self.width, self.sequence_length)
            if problem is not None:
                raise ValueError(f"mixers.{name}: {problem}")
        if idle := sorted(set(self.mixers) - set(used)):
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
            if layer.experts and layer.mlp == "relu2":
                raise ValueError("experts with mlp relu2 are not built yet; set mlp: swiglu or gelu")
        if self.pattern is not None and self.moe is None and "E" in self.pattern:
            raise ValueError("pattern has layers of experts (E); set moe, such as {experts: 8, top_k: 2}")
        if self.moe and not self.has_experts:
            raise ValueError("moe.experts is 0 in every layer; leave moe out for plain MLPs")
        return self

    @property
    def layer_list(self) -> tuple[LayerConfig, ...]:
        """One entry a layer: the source of pipeline stages, the planner's costs and the model."""
        return tuple(
            LayerConfig(
                mixer=self.mixer_of(index),
                mlp=self._mlp_of(index),
                window=_entry(self.window, index),
                norm_order=_entry(self.norm_order, index),
                **self._widths(index),
            )
            for index in range(self.layers)
        )

    def mixer_of(self, index: int) -> str:
        """The mixer of layer `index`."""
        return _entry(self.mixer, index) if self.pattern is None else pattern_layers(self.pattern)[index].mixer

    def mixer_named(self, name: str) -> Mixer:
        """A mixer with its options."""
        return mixer_class(name)(**self.mixers.get(name, {}))

    def _mlp_of(self, index: int) -> Mlp:
        has_mlp = self.pattern is None or pattern_layers(self.pattern)[index].has_mlp
        return _entry(self.mlp, index) if has_mlp else "none"

    @property
    def pattern_splits(self) -> tuple[int, ...] | None:
        """The first layer of each stage but the first, where the pattern has stages."""
        return pattern_stages(self.pattern) if self.pattern is not None and "|" in self.pattern else None

    @property
    def has_attention(self) -> bool:
        return any(self.mixer_of(index) == "attention" for index in range(self.layers))

    @property
    def stateful_mixers(self) -> tuple[str, ...]:
        """The mixers that carry a state from token to token, which therefore cannot form a tree; sorted."""
        return tuple(sorted({self.mixer_of(index) for index in range(self.layers)} - set(BUILT_IN)))

    @property
    def residual_additions(self) -> int:
        """Mixers and MLPs, each of which adds to the residual stream."""
        return sum((self.mixer_of(index) != "none") + (self._mlp_of(index) != "none") for index in range(self.layers))

    def _has_experts(self, index: int) -> bool:
        has_experts = self.pattern is None or pattern_layers(self.pattern)[index].has_experts
        return has_experts and self._mlp_of(index) != "none"

    def _widths(self, index: int) -> dict[str, int]:
        mlp = self._mlp_of(index)
        hidden = 0 if mlp == "none" else self.hidden_width(mlp)
        if self.moe is None or not self._has_experts(index) or not (experts := _entry(self.moe.experts, index)):
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
        return 4 * self.width if mlp != "swiglu" else -(-8 * self.width // (3 * 64)) * 64


def _entry(value: Any, index: int) -> Any:
    return value[index % len(value)] if isinstance(value, tuple) else value
