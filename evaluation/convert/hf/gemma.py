"""GemmaForCausalLM (arXiv 2403.08295), Gemma2ForCausalLM (2408.00118) and Gemma3ForCausalLM (2503.19786) and our
transformer: norms multiply by 1 + weight, and embeddings by the root of the width. Gemma 2 has norms around attention
and MLP, soft caps and windows; Gemma 3 normalizes queries and keys instead of capping and has two rotary bases."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.llama import attention_rules, ends_rules, mlp_rules, read_llama, write_llama
from gristmill.evaluation.convert.hf.moe import QK_NORM_RULES
from gristmill.evaluation.convert.hf.rope_and_windows import (
    FULL,
    SLIDING,
    layer_types,
    read_layer_types,
    read_rope_by_window,
    several_windows,
    stated_window,
    write_rope_by_window,
)
from gristmill.training.config.model import ModelConfig

ACTIVATION = "gelu_pytorch_tanh"
SANDWICH = {
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mixer_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
CONSTANTS = {"positions": "rope", "norm": "rmsnorm", "norm_plus_one": True, "mlp": "geglu"}
GEMMA_3_BASES = (1000000.0, 10000.0)  # without and with a window


def _rules(config: ModelConfig) -> list[WeightRule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _sandwich_rules(config: ModelConfig) -> list[WeightRule]:
    norms = QK_NORM_RULES if config.qk_norm else []
    return [*attention_rules(config), *norms, *mlp_rules(config), *ends_rules(config, SANDWICH)]


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    biases = config.biases if config.biases in (False, "attention") else False
    scales = config.scales.model_copy(update={"embedding": config.width**0.5, "residual": 1.0, "logit_divisor": 1.0})
    return unsupported_fields(config, **{**CONSTANTS, "biases": biases, "scales": scales, **wanted})


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"bidirectional": bool(fields.get("use_bidirectional_attention"))}, "bidirectional", False)
    read = read_llama({"tie_word_embeddings": True, **fields, "hidden_act": "silu", "mlp_bias": False})
    return {**read, **CONSTANTS, "scales": {"embedding": fields["hidden_size"] ** 0.5}}


def _write_gemma(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "mlp_bias")
    return {**fields, "hidden_act": ACTIVATION, "hidden_activation": ACTIVATION}


def _read_gemma(fields: Mapping[str, Any]) -> Fields:
    stated = fields.get("hidden_activation") or fields.get("hidden_act", ACTIVATION)
    if stated != "gelu":  # the published configs of Gemma 1 say gelu and mean its tanh form
        require_value({"hidden_act": stated}, "hidden_act", ACTIVATION)
    return _read({**fields, "head_dim": fields.get("head_dim", 256)})


def _gemma_lacks(config: ModelConfig) -> list[str]:
    lacking = _lacks(config, rope_scaling=config.rope_scaling)
    return lacking if config.scales.attention is None else [*lacking, f"scales.attention={config.scales.attention}"]


def _write_capped(config: ModelConfig) -> Fields:
    """Fields of Gemma 2 and 3."""
    return {
        **without(write_llama(config), "mlp_bias", "hidden_act", "rope_theta", "rope_scaling"),
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": _scalar(config),
        "final_logit_softcapping": config.logit_softcap,
        "attn_logit_softcapping": config.attention_softcap,
        "sliding_window": stated_window(config),
        "layer_types": layer_types(config),
    }


def _scalar(config: ModelConfig) -> float:
    """query_pre_attn_scalar, whose root scores are divided by: a whole number in all published models."""
    if config.scales.attention is None:
        return config.head_dim
    whole = round(config.scales.attention**-2)
    return whole if whole and whole**-0.5 == config.scales.attention else config.scales.attention**-2


def _read_capped(fields: Mapping[str, Any], pattern: int, caps: tuple[float | None, float | None]) -> Fields:
    """Fields of Gemma 2 and 3. pattern: one layer in so many has no window, where config.json does not name them. caps:
    of attention and logits, where it does not say them."""
    require_value({"hidden_activation": fields.get("hidden_activation", ACTIVATION)}, "hidden_activation", ACTIVATION)
    layers = int(fields["num_hidden_layers"])
    default = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers)]
    read = _read({**without({**fields}, "rope_parameters", "rope_scaling"), "head_dim": fields.get("head_dim", 256)})
    scalar = fields.get("query_pre_attn_scalar", 256)
    return {
        **read,
        **read_layer_types({"sliding_window": 4096, **fields}, default),
        "norm_order": "sandwich",
        "scales": read["scales"] | ({} if scalar == read["head_width"] else {"attention": scalar**-0.5}),
        "attention_softcap": fields.get("attn_logit_softcapping", caps[0]),
        "logit_softcap": fields.get("final_logit_softcapping", caps[1]),
    }


def _read_gemma2(fields: Mapping[str, Any]) -> Fields:
    rope = read_llama({**fields, "hidden_act": "silu"})
    return {
        **_read_capped(fields, 2, (50.0, 30.0)),
        **{name: rope[name] for name in ("rope_base", "rope_scaling") if name in rope},
    }


def _write_gemma2(config: ModelConfig) -> Fields:
    rope = {name: value for name, value in write_llama(config).items() if name.startswith("rope_")}
    return {**_write_capped(config), **rope}


def _gemma2_lacks(config: ModelConfig) -> list[str]:
    caps = {"attention_softcap": config.attention_softcap, "logit_softcap": config.logit_softcap}
    lacking = _lacks(config, windows=True, norm_order="sandwich", rope_scaling=config.rope_scaling, **caps)
    return lacking + several_windows(config)


def _read_gemma3(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "attn_logit_softcapping", None)
    read = _read_capped(fields, int(fields.get("sliding_window_pattern", 6)), (None, None))
    rope = read_rope_by_window(fields, *GEMMA_3_BASES)
    if read["window"] is None:
        rope.pop("window_rope_base", None)
    return {**read, **rope, "qk_norm": True}


def _write_gemma3(config: ModelConfig) -> Fields:
    return {**_write_capped(config), **write_rope_by_window(config)}


def _gemma3_lacks(config: ModelConfig) -> list[str]:
    rope = {"rope_scaling": config.rope_scaling, "window_rope_base": config.window_rope_base}
    caps = {"logit_softcap": config.logit_softcap}  # transformers' Gemma 3 reads a cap of attention and has none
    lacking = _lacks(config, windows=True, norm_order="sandwich", qk_norm=True, **rope, **caps)
    return lacking + several_windows(config)


GEMMA = ModelFamily("GemmaForCausalLM", "gemma", _gemma_lacks, _rules, _write_gemma, _read_gemma)
GEMMA_2 = ModelFamily("Gemma2ForCausalLM", "gemma2", _gemma2_lacks, _sandwich_rules, _write_gemma2, _read_gemma2)
GEMMA_3 = ModelFamily("Gemma3ForCausalLM", "gemma3_text", _gemma3_lacks, _sandwich_rules, _write_gemma3, _read_gemma3)
