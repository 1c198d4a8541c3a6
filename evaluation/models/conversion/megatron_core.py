"""Megatron-Core's GPTModel and our transformer. Its norms and projections are the usual ones; the rows of a group of
heads lie together (queries, key, value), and gate and up behind each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.evaluation.models.conversion.falcon import GROUPED
from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    linear_rules,
    norm_rules,
    weight_and_bias,
)
from gristmill.evaluation.models.conversion.phi import HALVES
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.foundation.errors import InputError
from gristmill.training.layer_config import GATED
from gristmill.training.model_config import ModelConfig

POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
REFUSED = {  # arguments that change the model and are not read, by the value that leaves it as it is
    "num_experts": (None, 0),
    "multi_latent_attention": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "rotary_interleaved": (None, False),
    "window_size": (None,),
    "qk_l2_norm": (None, False),
    "mtp_num_layers": (None, 0),
    "is_hybrid_model": (None, False),
    "quick_geglu": (None, False),
}
LLAMA3_SCALING = {  # of Megatron-Core's --use-rope-scaling
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rules(config: ModelConfig) -> list[Rule]:
    theirs, ours = "decoder.layers.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{theirs}.self_attention.linear_qkv", triple, GROUPED, GROUPED)
    rules = packed if config.projection_biases else packed[:1]
    rules += linear_rules({f"{theirs}.self_attention.linear_proj": f"{ours}.mixer.output"}, config.output_biases)
    if config.mlp in GATED:
        both = weight_and_bias(f"{theirs}.mlp.linear_fc1", (f"{ours}.mlp.gate", f"{ours}.mlp.up"), HALVES, HALVES)
        rules += both if config.mlp_biases else both[:1]
    else:
        rules += linear_rules({f"{theirs}.mlp.linear_fc1": f"{ours}.mlp.up"}, config.mlp_biases)
    rules += linear_rules({f"{theirs}.mlp.linear_fc2": f"{ours}.mlp.down"}, config.mlp_biases)
    norms = {
        f"{theirs}.input_layernorm": f"{ours}.mixer_norm",
        f"{theirs}.pre_mlp_layernorm": f"{ours}.mlp_norm",
        "decoder.final_layernorm": "final_norm",
    }
    if config.qk_norm:
        norms |= {f"{theirs}.self_attention.{name}_layernorm": f"{ours}.mixer.{own}_norm" for name, own in QK.items()}
    rules += norm_rules(config, norms)
    rules.append(Rule("embedding.word_embeddings.weight", ("embedding.weight",)))
    if config.positions == "learned":
        rules.append(Rule("embedding.position_embeddings.weight", ("positions.weight",)))
    return rules if config.tied_embeddings else [*rules, Rule("output_layer.weight", ("head.weight",))]


QK = {"q": "query", "k": "key"}


def config_of(place: Path, arguments: Any) -> ModelConfig:
    """arguments: of the run, as common.pt holds them. Raises InputError naming what gristmill does not have."""
    for name, plain in REFUSED.items():
        if (value := getattr(arguments, name, None)) not in plain:
            raise InputError(f"{place}: {name} is {value!r}, which gristmill does not import")
    try:
        return ModelConfig(**_fields(arguments))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        line = str(error).replace("\n", " ")
        raise InputError(f"{place}: args do not describe a model that gristmill has ({line})") from error


def _fields(arguments: Any) -> Fields:
    heads, width = arguments.num_attention_heads, arguments.hidden_size
    grouped = getattr(arguments, "group_query_attention", False)
    has_biases = getattr(arguments, "add_bias_linear", True)
    return {
        "layers": arguments.num_layers,
        "width": width,
        "heads": heads,
        "kv_heads": arguments.num_query_groups if grouped else heads,
        "head_width": getattr(arguments, "kv_channels", None) or width // heads,
        "hidden": getattr(arguments, "ffn_hidden_size", None) or 4 * width,
        "sequence_length": getattr(arguments, "max_position_embeddings", None) or arguments.seq_length,
        "norm": NORMS[getattr(arguments, "normalization", "LayerNorm")],
        "norm_plus_one": getattr(arguments, "apply_layernorm_1p", False),
        "norm_epsilon": _first(arguments, "norm_epsilon", "layernorm_epsilon", default=1e-5),
        "biases": True if has_biases else "qkv" if getattr(arguments, "add_qkv_bias", False) else False,
        "qk_norm": getattr(arguments, "qk_layernorm", False),
        "tied_embeddings": not getattr(arguments, "untie_embeddings_and_output_weights", False),
        **_mlp(arguments, has_biases),
        **_positions(arguments),
    }


def _mlp(arguments: Any, has_biases: bool) -> Fields:
    if getattr(arguments, "swiglu", False):
        return {"mlp": "swiglu"}
    if getattr(arguments, "squared_relu", False):
        return {"mlp": "relu2"}
    fused = getattr(arguments, "bias_gelu_fusion", True) and has_biases  # the fused kernel has the tanh form
    return {"mlp": "gelu", "gelu": "tanh" if fused or getattr(arguments, "openai_gelu", False) else "exact"}


def _positions(arguments: Any) -> Fields:
    kind = POSITIONS[getattr(arguments, "position_embedding_type", "learned_absolute")]
    if kind != "rope":
        return {"positions": kind}
    width = getattr(arguments, "kv_channels", None) or arguments.hidden_size // arguments.num_attention_heads
    turned = int(width * getattr(arguments, "rotary_percent", 1.0))
    scaling = None
    if getattr(arguments, "use_rope_scaling", False):
        scaling = {**LLAMA3_SCALING, "factor": getattr(arguments, "rope_scaling_factor", 8.0)}
    base = float(getattr(arguments, "rotary_base", 10000))
    return {
        "positions": kind,
        "rope_base": base,
        "rope_width": 0 if turned == width else turned,
        "rope_scaling": scaling,
    }


def _first(arguments: Any, *names: str, default: Any) -> Any:
    return next((getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None), default)


def _not_of_transformers(_: Mapping[str, Any] | ModelConfig) -> Any:
    raise NotImplementedError("Megatron-Core's checkpoints are read, by open_megatron_core, and not written")


GPT_MODEL = Family(
    "GPTModel", "megatron-core", _not_of_transformers, _rules, _not_of_transformers, _not_of_transformers
)
