"""Configuration of one layer, and the kinds of parts it may have. Without torch."""

import math
from collections.abc import Sequence
from math import isqrt
from typing import Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config

Mlp = Literal["swiglu", "geglu", "gelu", "relu", "relu2", "none"]
NormOrder = Literal["pre", "post", "output", "sandwich"]
RMSNORMS = ("rmsnorm", "plain_rmsnorm")
GATED = ("swiglu", "geglu")


class LayerConfig(Config):
    """Configuration of one layer. mixer, mlp: none where the layer has only the other. window: number of tokens that
    each token attends to, itself included; None: all. rope: whether rotary positions, where the model has them, turn
    this layer's queries and keys.

    ffn_hidden_size: width of the MLP that all tokens go through; in a mixture, that of its shared experts or of
    PR-MoE's MLP, 0 if it has neither. experts: of a mixture, 0 elsewhere; each token goes to top_k of them, each
    expert_ffn_hidden_size wide."""

    mixer: str = "attention"
    mlp: Mlp = "swiglu"
    ffn_hidden_size: int = 0
    window: int | None = None
    rope: bool = True
    experts: int = 0
    top_k: int = 0
    expert_ffn_hidden_size: int = 0
    norm_order: NormOrder = "pre"


# Upper bounds of sizes in a recipe, so that a wrong digit is an error before memory is allocated.

# No real run reaches them: the deepest published transformers have about 1,000 layers, Llama 3 405B is 16,384 wide.
MAX_LAYERS = 10_000
MAX_WIDTH = 1_000_000
MAX_SEQUENCE = 100_000_000
MAX_PROCESSES = 1_000_000
MAX_TOKENS = 10**18
MAX_BATCH_TOKENS = 10**12
MAX_RAMP_STEPS = 10_000
MAX_EXPERTS = 100_000
# Far beyond every published model, and within what float32 multiplies without losing the other factor.
MAX_SCALE, MAX_ROPE_BASE = 1e6, 1e12


# Constant factors of a model's parts. Without torch.


class Scales(Config):
    """Constant factors of embedding, layers and logits, as Granite has them (arXiv 2405.04324) and Gemma some."""

    embedding: float = Field(1.0, gt=0, le=MAX_SCALE, description="of the token embedding; Gemma's is sqrt(width)")
    residual: float = Field(1.0, gt=0, le=MAX_SCALE, description="of what attention and MLP add to the residual stream")
    attention: float | None = Field(
        None, gt=0, le=MAX_SCALE, description="of queries times keys; null: 1 / sqrt(head width)"
    )
    logit_divisor: float = Field(1.0, gt=0, le=MAX_SCALE, description="logits are divided by it")


# Configuration of mixture-of-experts layers. No torch here.

PerLayer = int | tuple[int, ...]


class MoeConfig(Config):
    """The MLP of a layer as a mixture of experts. `experts`, `top_k` and `ffn_hidden_size` take one value, or a pattern
    that is repeated over the layers: experts [0, 64] makes every other layer a mixture, 0 being the plain MLP.

    Mixtral is {experts: 8, top_k: 2}, DeepSeek-V3 (arXiv 2412.19437) {experts: 256, top_k: 8, shared_experts: 1,
    router: sigmoid, gate_scale: 2.5, groups: 8, top_groups: 4, bias_update_rate: 1.0e-3} after three dense layers,
    DeepSpeed-MoE (arXiv 2201.05596) {experts: [0, 128], top_k: 1, normalize_gates: false, capacity_factor: 1.0}."""

    experts: PerLayer = Field(description="experts of a layer; 0 is a plain MLP; a list is a repeated pattern")
    top_k: PerLayer = Field(2, description="experts a token goes to; a list is a repeated pattern")
    ffn_hidden_size: PerLayer = Field(0, description="hidden width of an expert; 0 means that of the plain MLP")
    shared_experts: int = Field(
        0, ge=0, le=MAX_EXPERTS, description="experts that every token goes to, computed as one MLP"
    )
    residual: bool = Field(
        False,
        description="PR-MoE: a plain MLP beside the experts, mixed by a learned softmax (arXiv 2201.05596, section 4)",
    )
    router: Literal["softmax", "sigmoid"] = Field("softmax", description="how logits become the experts' scores")
    normalize_gates: bool = Field(True, description="the gates of a token are divided by their sum")
    gate_scale: float = Field(1.0, gt=0, le=MAX_SCALE, description="factor on the gates")
    groups: int = Field(1, ge=1, le=MAX_EXPERTS, description="groups of experts for group-limited routing")
    top_groups: int = Field(1, ge=1, le=MAX_EXPERTS, description="groups that the experts of a token may come from")
    group_score: Literal["sum", "best"] = Field(
        "sum",
        description="of a group: the sum of its best top_k / top_groups experts (DeepSeek-V3), or its best expert (V2)",
        json_schema_extra={"omit_default": True},
    )
    bias_update_rate: float = Field(
        0.0, ge=0, description="step of the bias that balances experts without a loss (arXiv 2408.15664: 1e-3); 0: none"
    )
    balance_loss: float = Field(0.0, ge=0, le=100, description="weight of the load-balancing loss")
    balance_over: Literal["sequence", "batch"] = Field(
        "sequence", description="the tokens whose load the balancing loss looks at"
    )
    router_z_loss: float = Field(
        0.0, ge=0, le=100, description="weight of log(Z)^2 of the router (ST-MoE, arXiv 2202.08906)"
    )
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="in training an expert takes at most this x top_k x sequence_length / experts tokens of a "
        "document; null: all",
    )
    drop: Literal["random", "last"] = Field(
        "last",
        description="which tokens go above the capacity: the last of the document, or random ones, with which later "
        "tokens of a document change the results of earlier ones",
    )

    @model_validator(mode="after")
    def patterns_have_entries(self) -> Self:
        for name, pattern in self.patterns().items():
            if not pattern:
                raise ValueError(f"{name} is an empty list; give one number, or one for each layer")
        return self

    @model_validator(mode="after")
    def groups_are_legal(self) -> Self:
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups={self.top_groups} is above groups={self.groups}; lower it")
        return self

    @model_validator(mode="after")
    def one_mlp_beside_the_experts(self) -> Self:
        if self.residual and self.shared_experts:
            raise ValueError(
                "residual and shared_experts both put an MLP beside the experts; set shared_experts: 0 for PR-MoE, or "
                "residual: false"
            )
        return self

    def patterns(self) -> dict[str, tuple[int, ...]]:
        """The per-layer fields that were given as patterns."""
        settings = {name: getattr(self, name) for name in ("experts", "top_k", "ffn_hidden_size")}
        return {name: value for name, value in settings.items() if isinstance(value, tuple)}

    def problem(self, layers: Sequence[LayerConfig]) -> str | None:
        """Why the model's layers are not legal with these experts, or None."""
        for index, layer in enumerate(layers):
            if problem := self._layer_problem(layer.experts, layer.top_k, layer.expert_ffn_hidden_size):
                return f"moe: layer {index}: {problem}"
            if layer.experts and layer.mlp not in ("swiglu", "gelu"):
                return f"experts with mlp {layer.mlp} are not built yet; set mlp: swiglu or gelu"
        has_experts = any(layer.experts for layer in layers)
        return None if has_experts else "moe.experts is 0 in every layer; leave moe out for plain MLPs"

    def _layer_problem(self, experts: int, top_k: int, ffn_hidden_size: int) -> str | None:
        """Why a layer with these numbers is not legal, or None."""
        if experts < 0 or ffn_hidden_size < 0 or experts > MAX_EXPERTS or ffn_hidden_size > MAX_WIDTH:
            return (
                f"experts={experts} and ffn_hidden_size={ffn_hidden_size} must be between 0 and {MAX_EXPERTS} and "
                f"{MAX_WIDTH}"
            )
        if experts == 0:
            return None
        if not 1 <= top_k <= experts:
            return f"top_k={top_k} of {experts} experts; set top_k between 1 and {experts}"
        if experts % self.groups:
            return f"{experts} experts do not split into groups={self.groups}; change one"
        if top_k > experts // self.groups * self.top_groups:
            return (
                f"top_k={top_k}, but top_groups={self.top_groups} groups hold {experts // self.groups} experts each; "
                "raise top_groups or lower top_k"
            )
        if self.groups > 1 and self.group_score == "sum" and top_k % self.top_groups:
            return f"top_k={top_k} is not a multiple of top_groups={self.top_groups}, by which groups are scored"
        return None


# Configuration of rotary positions for contexts longer than those of pretraining. Without torch.


class RopeScaling(Config):
    """How the rotary frequencies are lowered; the names are those of transformers' config.json.

    linear: all by `factor` (arXiv 2306.15595). llama3: those that turn fewer than low_freq_factor times within the
    original length by `factor`, those that turn more than high_freq_factor times not at all, between them by a share
    that rises linearly with the turns (Llama 3.1, arXiv 2407.21783; the rule of the published models). yarn: the same
    idea with beta_slow and beta_fast turns and a ramp over the features, and cosine and sine scaled by attention_factor
    (arXiv 2309.00071, sections 3.2 and 3.4). ntk: by a larger base, so that the fastest feature keeps its frequency and
    the slowest turns `factor` times slower (the same, section 3.1); transformers has it as a changed rope_theta."""

    rope_type: Literal["linear", "ntk", "llama3", "yarn"] = Field(description="the rule, as above")
    factor: float = Field(ge=1, le=MAX_SCALE, description="by which frequencies are lowered")
    original_max_position_embeddings: int = Field(
        0, ge=0, le=MAX_SEQUENCE, description="tokens of a sample in pretraining; llama3 and yarn need it"
    )
    low_freq_factor: float = Field(1.0, gt=0, le=MAX_SCALE, description="of llama3")
    high_freq_factor: float = Field(4.0, gt=0, le=MAX_SCALE, description="of llama3")
    beta_fast: float = Field(32.0, gt=0, le=MAX_SCALE, description="of yarn")
    beta_slow: float = Field(1.0, gt=0, le=MAX_SCALE, description="of yarn")
    attention_factor: float | None = Field(None, gt=0, le=MAX_SCALE, description="of yarn; null: 0.1 ln(factor) + 1")
    mscale: float | None = Field(
        None,
        gt=0,
        le=MAX_SCALE,
        description="of yarn: factor of the logarithm above",
        json_schema_extra={"omit_default": True},
    )
    mscale_all_dim: float | None = Field(
        None,
        gt=0,
        le=MAX_SCALE,
        description="of yarn: attention_factor is divided by that of this factor of the logarithm, and latent "
        "attention multiplies its scores by the square of it (DeepSeek)",
        json_schema_extra={"omit_default": True},
    )

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        if self.rope_type in ("llama3", "yarn") and not self.original_max_position_embeddings:
            raise ValueError(f"rope_scaling of type {self.rope_type} needs original_max_position_embeddings")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor} must be below {self.high_freq_factor=}")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be below {self.beta_fast=}")
        return self

    @property
    def rotation_factor(self) -> float:
        """Factor of cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._logarithmic(1.0)
        return self._logarithmic(self.mscale) / self._logarithmic(self.mscale_all_dim)

    @property
    def latent_score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return 1.0 if self.mscale_all_dim is None else self._logarithmic(self.mscale_all_dim) ** 2

    def _logarithmic(self, share: float) -> float:
        return 0.1 * share * math.log(self.factor) + 1

    def ntk_base(self, base: float, width: int) -> float:
        """The larger base of ntk, for heads that turn `width` features: base x factor^(width / (width - 2)). 10000, 128
        and factor 4 -> 40890."""
        return base * self.factor ** (width / max(width - 2, 1))


# Configuration of a linear output beside the vocabulary's. Without torch.


class OutputConfig(Config):
    """A linear output beside the vocabulary's. over: of the pooled first token, or of every token."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="by which an objective asks for it")
    size: int = Field(ge=1, le=MAX_WIDTH, description="numbers it gives, such as the classes")
    over: Literal["pooled", "tokens"] = "pooled"


# Divisors of a number: what error messages suggest and what the planner tries.


def divisors(number: int) -> list[int]:
    """12 -> [1, 2, 3, 4, 6, 12]."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest(values: list[int], wanted: int) -> int:
    """The value next to the wanted one, the smaller of two. [1, 2, 4, 8], 6 -> 4."""
    return min(values, key=lambda value: (abs(value - wanted), value))
