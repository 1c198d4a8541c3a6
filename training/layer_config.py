"""Configuration of one layer, and the kinds of parts it may have. Without torch."""

from typing import Literal

from gristmill.foundation.config import Config

Mlp = Literal["swiglu", "geglu", "gelu", "relu", "relu2", "none"]
NormOrder = Literal["pre", "post", "output", "sandwich"]
GATED = ("swiglu", "geglu")


class LayerConfig(Config):
    """Configuration of one layer. mixer, mlp: none where the layer has only the other. window: number of tokens that
    each token attends to, itself included; None: all. rope: whether rotary positions, where the model has them, turn
    this layer's queries and keys.

    hidden: width of the MLP that all tokens go through; in a mixture, that of its shared experts or of PR-MoE's MLP, 0
    if it has neither. experts: of a mixture, 0 elsewhere; each token goes to top_k of them, each expert_hidden wide."""

    mixer: str = "attention"
    mlp: Mlp = "swiglu"
    hidden: int = 0
    window: int | None = None
    rope: bool = True
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    norm_order: NormOrder = "pre"
