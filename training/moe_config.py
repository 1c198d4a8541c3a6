"""Configuration of mixture-of-experts layers. No torch here."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config
from gristmill.training.limits import MAX_EXPERTS, MAX_WIDTH

PerLayer = int | tuple[int, ...]


class MoeConfig(Config):
    """The MLP of a layer as a mixture of experts. `experts`, `top_k` and `hidden` take one value, or a pattern that is
    repeated over the layers: experts [0, 64] makes every other layer a mixture, 0 being the plain MLP.

    Mixtral is {experts: 8, top_k: 2}, DeepSeek-V3 (arXiv 2412.19437) {experts: 256, top_k: 8, shared_experts: 1,
    router: sigmoid, gate_scale: 2.5, groups: 8, top_groups: 4, bias_update_rate: 1.0e-3} after three dense layers,
    DeepSpeed-MoE (arXiv 2201.05596) {experts: [0, 128], top_k: 1, normalize_gates: false, capacity_factor: 1.0}."""

    experts: PerLayer = Field(description="experts of a layer; 0 is a plain MLP; a list is a repeated pattern")
    top_k: PerLayer = Field(2, description="experts a token goes to; a list is a repeated pattern")
    hidden: PerLayer = Field(0, description="hidden width of an expert; 0 means that of the plain MLP")
    shared_experts: int = Field(
        0, ge=0, le=MAX_EXPERTS, description="experts that every token goes to, computed as one MLP"
    )
    residual: bool = Field(
        False,
        description="PR-MoE: a plain MLP beside the experts, mixed by a learned softmax (arXiv 2201.05596, section 4)",
    )
    router: Literal["softmax", "sigmoid"] = Field("softmax", description="how logits become the experts' scores")
    normalize_gates: bool = Field(True, description="the gates of a token are divided by their sum")
    gate_scale: float = Field(1.0, gt=0, description="factor on the gates")
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
    balance_loss: float = Field(0.0, ge=0, description="weight of the load-balancing loss")
    balance_over: Literal["sequence", "batch"] = Field(
        "sequence", description="the tokens whose load the balancing loss looks at"
    )
    router_z_loss: float = Field(0.0, ge=0, description="weight of log(Z)^2 of the router (ST-MoE, arXiv 2202.08906)")
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="an expert takes at most this x top_k x tokens / experts tokens of a sample in training; null: all",
    )
    drop: Literal["random", "last"] = Field(
        "random", description="which tokens go above the capacity: random ones, or the last of the sample"
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
        found = {name: getattr(self, name) for name in ("experts", "top_k", "hidden")}
        return {name: value for name, value in found.items() if isinstance(value, tuple)}

    def layer_problem(self, experts: int, top_k: int, hidden: int) -> str | None:
        """Why a layer with these numbers is not legal, or None."""
        if experts < 0 or hidden < 0 or experts > MAX_EXPERTS or hidden > MAX_WIDTH:
            return f"experts={experts} and hidden={hidden} must be between 0 and {MAX_EXPERTS} and {MAX_WIDTH}"
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
