"""MegatronBertForPreTraining (norms before, arXiv 1909.08053) and BertForPreTraining (norms after, arXiv 1810.04805).

Both heads are converted: that of the masked tokens, and that of two classes over the pooled first token, which
transformers calls seq_relationship (Megatron-LM trains it on the order of two segments, the first BERT on whether they
are neighbours)."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    require_value,
    unsupported_fields,
    weight_and_bias,
)
from gristmill.evaluation.models.conversion.tensor_conversion import SAME, Rule
from gristmill.training.model_config import ModelConfig
from gristmill.training.output_config import OutputConfig

SENTENCE_ORDER = OutputConfig(name="sentence_order", size=2)
SHARED = {
    "attention": "bidirectional",
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "biases": True,
    "tied_embeddings": True,
    "head_transform": True,
    "head_bias": True,
    "outputs": (SENTENCE_ORDER,),
}
REARRANGED: dict[str, Any] = SHARED | {"norm_order": "pre", "embedding_norm": False, "final_norm": True}
ORIGINAL: dict[str, Any] = SHARED | {"norm_order": "post", "embedding_norm": "sum", "final_norm": False}

LAYER_NAMES = {
    "attention.self.query": "mixer.query",
    "attention.self.key": "mixer.key",
    "attention.self.value": "mixer.value",
    "attention.output.dense": "mixer.output",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
}
REARRANGED_NORMS = {
    "bert.encoder.layer.{i}.attention.ln": "layers.{i}.mixer_norm",
    "bert.encoder.layer.{i}.ln": "layers.{i}.mlp_norm",
    "bert.encoder.ln": "final_norm",
}
ORIGINAL_NORMS = {
    "bert.encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.mixer_norm",
    "bert.encoder.layer.{i}.output.LayerNorm": "layers.{i}.mlp_norm",
    "bert.embeddings.LayerNorm": "embedding_norm",
}
HEADS = {
    "bert.pooler.dense": "outputs.pooler",
    "cls.predictions.transform.dense": "head.transform",
    "cls.predictions.transform.LayerNorm": "head.transform.norm",
    "cls.seq_relationship": "outputs.linear.sentence_order",
}


def rules(norms: Mapping[str, str], heads: Mapping[str, str]) -> list[Rule]:
    """The rules of embeddings and layers, and of heads: their linear layers by name."""
    found = [
        Rule("bert.embeddings.word_embeddings.weight", ("embedding.weight",)),
        Rule("bert.embeddings.position_embeddings.weight", ("positions.weight",)),
        Rule("bert.embeddings.token_type_embeddings.weight", ("segments.weight",)),
    ]
    layers = {f"bert.encoder.layer.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for theirs, ours in LAYER_NAMES.items()}
    for theirs, ours in (layers | dict(norms) | dict(heads)).items():
        found += weight_and_bias(theirs, (ours,), SAME, SAME)
    return found


def _pretraining_rules(norms: Mapping[str, str]) -> list[Rule]:
    return [*rules(norms, HEADS), Rule("cls.predictions.bias", ("head.bias",))]


def write(config: ModelConfig) -> Fields:
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden_width("gelu"),
        "max_position_embeddings": config.sequence_length,
        "type_vocab_size": config.segments,
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": "gelu" if config.gelu == "exact" else "gelu_new",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
    }


def read(fields: Mapping[str, Any], constants: Mapping[str, Any]) -> Fields:
    activation = fields.get("hidden_act", "gelu")
    if activation not in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        require_value(fields, "hidden_act", "gelu")
    return {
        **constants,
        "layers": fields["num_hidden_layers"],
        "width": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "hidden": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "segments": fields.get("type_vocab_size", 2),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-12),
        "gelu": "exact" if activation == "gelu" else "tanh",
    }


def unsupported(config: ModelConfig, constants: Mapping[str, Any]) -> list[str]:
    found = unsupported_fields(config, **constants, gelu=config.gelu, segments=config.segments)
    if config.num_kv_heads != config.heads:
        found.append(f"kv_heads={config.kv_heads}")
    if config.head_dim * config.heads != config.width:
        found.append(f"head_width={config.head_width}")
    return found


MEGATRON_BERT = Family(
    "MegatronBertForPreTraining",
    "megatron-bert",
    lambda config: unsupported(config, REARRANGED),
    lambda _: _pretraining_rules(REARRANGED_NORMS),
    write,
    lambda fields: read(fields, REARRANGED),
)
BERT = Family(
    "BertForPreTraining",
    "bert",
    lambda config: unsupported(config, ORIGINAL),
    lambda _: _pretraining_rules(ORIGINAL_NORMS),
    write,
    lambda fields: read(fields, ORIGINAL),
)
