"""MistralForCausalLM (arXiv 2310.06825), Qwen2ForCausalLM (2407.10671), Qwen3ForCausalLM (2505.09388) and
Starcoder2ForCausalLM (2402.19173): Llamas with windows, with other biases, with normalized queries and keys, or with
GPT-2's norm and MLP; Granite, SmolLM3, Nemotron and Gemma below."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    other_widths,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.llama import (
    QK_NORM_RULES,
    attention_rules,
    ends_rules,
    layer_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.convert.hf.rope_and_windows import (
    FULL,
    SLIDING,
    layer_types,
    one_window,
    read_layer_types,
    read_one_window,
    read_partial_rope,
    read_rope_by_window,
    read_windows,
    several_windows,
    some_windows,
    stated_window,
    write_partial_rope,
    write_rope_by_window,
    write_windows,
)
from gristmill.foundation.errors import InputError
from gristmill.training.config.layers import Scales
from gristmill.training.config.model import ModelConfig


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "biases": False, "qk_norm": False}
    lacking = unsupported_fields(config, windows=True, rope_scaling=config.rope_scaling, **(plain | wanted))
    return lacking + several_windows(config)


def _rules(config: ModelConfig) -> list[WeightRule]:
    norms = QK_NORM_RULES if config.qk_norm else []
    return [*attention_rules(config), *norms, *mlp_rules(config), *ends_rules(config)]


def _mistral_lacks(config: ModelConfig) -> list[str]:
    return _lacks(config) + some_windows(config)


def _write_mistral(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias")
    return fields | {"sliding_window": one_window(config)}


def _read_mistral(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_one_window(fields)


def _write_qwen2(config: ModelConfig) -> Fields:
    return without(write_llama(config), "attention_bias", "mlp_bias", "head_dim") | write_windows(config)


def _read_qwen2(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_windows(fields) | {"biases": "qkv"}


def _qwen2_lacks(config: ModelConfig) -> list[str]:
    return _lacks(config, biases="qkv") + other_widths(config)


def _write_qwen3(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias") | write_windows(config)


def _read_qwen3(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_windows(fields) | {"qk_norm": True}


def _qwen3_lacks(config: ModelConfig) -> list[str]:
    biases = config.biases if config.biases in (False, "attention") else False
    return _lacks(config, biases=biases, qk_norm=True)


def _starcoder2_rules(config: ModelConfig) -> list[WeightRule]:
    mlp = layer_rules({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, config.mlp_biases)
    return [*attention_rules(config), *mlp, *ends_rules(config)]


def _write_starcoder2(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias", "rms_norm_eps", "head_dim")
    return fields | {
        "intermediate_size": config.hidden_width("gelu"),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config.norm_epsilon,
        "use_bias": True,
        "sliding_window": one_window(config),
    }


def _read_starcoder2(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "gelu_pytorch_tanh")
    require_value({"use_bias": fields.get("use_bias", True)}, "use_bias", True)
    read = read_llama({**fields, "hidden_act": "silu", "rms_norm_eps": fields["norm_epsilon"]})
    return {**read, **read_one_window(fields), "biases": True, "mlp": "gelu", "norm": "layernorm"}


def _starcoder2_lacks(config: ModelConfig) -> list[str]:
    lacking = _lacks(config, biases=True, norm="layernorm", mlp="gelu")
    return lacking + some_windows(config) + other_widths(config)


MISTRAL = ModelFamily("MistralForCausalLM", "mistral", _mistral_lacks, _rules, _write_mistral, _read_mistral)
QWEN2 = ModelFamily("Qwen2ForCausalLM", "qwen2", _qwen2_lacks, _rules, _write_qwen2, _read_qwen2)
QWEN3 = ModelFamily("Qwen3ForCausalLM", "qwen3", _qwen3_lacks, _rules, _write_qwen3, _read_qwen3)
STARCODER2 = ModelFamily(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _starcoder2_lacks,
    _starcoder2_rules,
    _write_starcoder2,
    _read_starcoder2,
)


# GraniteForCausalLM (arXiv 2405.04324) and SmolLM3ForCausalLM (2025) and our transformer: Llamas with constant
# factors, and with layers without rotary positions.


def _plain_rules(config: ModelConfig) -> list[WeightRule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _lacks_in_granite(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "rope_scaling": config.rope_scaling}
    biases = config.biases if config.biases != "qkv" else False
    return unsupported_fields(config, **plain, biases=biases, **wanted) + other_widths(config)


def _write_granite(config: ModelConfig) -> Fields:
    scales = config.scales
    return {
        **without(write_llama(config), "head_dim"),
        "embedding_multiplier": scales.embedding,
        "residual_multiplier": scales.residual,
        "attention_multiplier": config.head_dim**-0.5 if scales.attention is None else scales.attention,
        "logits_scaling": scales.logit_divisor,
    }


def _read_granite(fields: Mapping[str, Any]) -> Fields:
    scales = Scales(
        embedding=fields.get("embedding_multiplier", 1.0),
        residual=fields.get("residual_multiplier", 1.0),
        attention=fields.get("attention_multiplier", 1.0),
        logit_divisor=fields.get("logits_scaling", 1.0),
    )
    return {**read_llama(fields), "scales": scales}


def _granite_lacks(config: ModelConfig) -> list[str]:
    return _lacks_in_granite(config, scales=config.scales)


def _write_smollm3(config: ModelConfig) -> Fields:
    return {
        **without(write_llama(config), "head_dim"),
        "no_rope_layers": [int(layer.rope) for layer in config.layer_list],
        "use_sliding_window": one_window(config) is not None,
        "sliding_window": one_window(config),
        "layer_types": layer_types(config),
    }


def _read_smollm3(fields: Mapping[str, Any]) -> Fields:
    layers, every = int(fields["num_hidden_layers"]), int(fields.get("no_rope_layer_interval", 4))
    turned = [bool(turns) for turns in fields.get("no_rope_layers") or ()]
    turned = turned or [(index + 1) % every != 0 for index in range(layers)]
    if len(turned) < layers:
        raise InputError(f"config.json has {len(turned)} no_rope_layers for {layers} layers; fetch the file again")
    has_windows = bool(fields.get("use_sliding_window")) and fields.get("sliding_window") is not None
    kinds = [SLIDING if has_windows and not turns else FULL for turns in turned[:layers]]
    rope_layers = None if all(turned[:layers]) else tuple(turned[:layers])
    read = read_llama({"tie_word_embeddings": True, **fields})
    return {**read, **read_layer_types(fields, kinds), "rope_layers": rope_layers}


def _smollm3_lacks(config: ModelConfig) -> list[str]:
    return _lacks_in_granite(config, windows=True, rope_layers=config.rope_layers) + several_windows(config)


GRANITE = ModelFamily("GraniteForCausalLM", "granite", _granite_lacks, _plain_rules, _write_granite, _read_granite)
SMOLLM3 = ModelFamily("SmolLM3ForCausalLM", "smollm3", _smollm3_lacks, _plain_rules, _write_smollm3, _read_smollm3)


# NemotronForCausalLM (Nemotron-4, arXiv 2402.16819; Minitron) and our transformer: LayerNorms that multiply by 1 +
# weight, squared ReLU, and heads of which a part turns.

CONSTANTS = {"positions": "rope", "norm": "layernorm", "norm_plus_one": True, "mlp": "relu2"}
SHARE = 0.5  # of a head that turns, where config.json does not say it


def _nemotron_rules(config: ModelConfig) -> list[WeightRule]:
    mlp = layer_rules({"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}, config.mlp_biases)
    return [*attention_rules(config), *mlp, *ends_rules(config)]


def _write(config: ModelConfig) -> Fields:
    return {
        **without(write_llama(config), "rms_norm_eps"),
        **write_partial_rope(config),
        "intermediate_size": config.hidden_width("relu2"),
        "hidden_act": "relu2",
        "norm_eps": config.norm_epsilon,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"hidden_act": fields.get("hidden_act", "relu2")}, "hidden_act", "relu2")
    plain = {"partial_rotary_factor": None, "rope_parameters": None, "rope_scaling": None}
    read = read_llama({**fields, **plain, "hidden_act": "silu", "rms_norm_eps": fields.get("norm_eps", 1e-5)})
    return {**read, **CONSTANTS, **read_partial_rope(fields, read["head_width"], SHARE)}


def _unsupported(config: ModelConfig) -> list[str]:
    biases = config.biases if config.biases != "qkv" else False
    rope = {"rope_width": config.rope_width, "rope_scaling": config.rope_scaling}
    return unsupported_fields(config, **CONSTANTS, biases=biases, **rope)


NEMOTRON = ModelFamily("NemotronForCausalLM", "nemotron", _unsupported, _nemotron_rules, _write, _read)


# GemmaForCausalLM (arXiv 2403.08295), Gemma2ForCausalLM (2408.00118) and Gemma3ForCausalLM (2503.19786) and our
# transformer: norms multiply by 1 + weight, and embeddings by the root of the width. Gemma 2 has norms around
# attention and MLP, soft caps and windows; Gemma 3 normalizes queries and keys instead of capping and has two rotary
# bases.


ACTIVATION = "gelu_pytorch_tanh"
SANDWICH = {
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mixer_output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
GEMMA_CONSTANTS = {"positions": "rope", "norm": "rmsnorm", "norm_plus_one": True, "mlp": "geglu"}
GEMMA_3_BASES = (1000000.0, 10000.0)  # without and with a window


def _sandwich_rules(config: ModelConfig) -> list[WeightRule]:
    norms = QK_NORM_RULES if config.qk_norm else []
    return [*attention_rules(config), *norms, *mlp_rules(config), *ends_rules(config, SANDWICH)]


def _all_gemmas_lack(config: ModelConfig, **wanted: Any) -> list[str]:
    biases = config.biases if config.biases in (False, "attention") else False
    scales = config.scales.model_copy(update={"embedding": config.width**0.5, "residual": 1.0, "logit_divisor": 1.0})
    return unsupported_fields(config, **{**GEMMA_CONSTANTS, "biases": biases, "scales": scales, **wanted})


def _read_all_gemmas(fields: Mapping[str, Any]) -> Fields:
    require_value({"bidirectional": bool(fields.get("use_bidirectional_attention"))}, "bidirectional", False)
    read = read_llama({"tie_word_embeddings": True, **fields, "hidden_act": "silu", "mlp_bias": False})
    return {**read, **GEMMA_CONSTANTS, "scales": {"embedding": fields["hidden_size"] ** 0.5}}


def _write_gemma(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "mlp_bias")
    return {**fields, "hidden_act": ACTIVATION, "hidden_activation": ACTIVATION}


def _read_gemma(fields: Mapping[str, Any]) -> Fields:
    stated = fields.get("hidden_activation") or fields.get("hidden_act", ACTIVATION)
    if stated != "gelu":  # the published configs of Gemma 1 say gelu and mean its tanh form
        require_value({"hidden_act": stated}, "hidden_act", ACTIVATION)
    return _read_all_gemmas({**fields, "head_dim": fields.get("head_dim", 256)})


def _gemma_lacks(config: ModelConfig) -> list[str]:
    lacking = _all_gemmas_lack(config, rope_scaling=config.rope_scaling)
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
    read = _read_all_gemmas(
        {**without({**fields}, "rope_parameters", "rope_scaling"), "head_dim": fields.get("head_dim", 256)}
    )
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
    lacking = _all_gemmas_lack(config, windows=True, norm_order="sandwich", rope_scaling=config.rope_scaling, **caps)
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
    lacking = _all_gemmas_lack(config, windows=True, norm_order="sandwich", qk_norm=True, **rope, **caps)
    return lacking + several_windows(config)


GEMMA = ModelFamily("GemmaForCausalLM", "gemma", _gemma_lacks, _plain_rules, _write_gemma, _read_gemma)
GEMMA_2 = ModelFamily("Gemma2ForCausalLM", "gemma2", _gemma2_lacks, _sandwich_rules, _write_gemma2, _read_gemma2)
GEMMA_3 = ModelFamily("Gemma3ForCausalLM", "gemma3_text", _gemma3_lacks, _sandwich_rules, _write_gemma3, _read_gemma3)
