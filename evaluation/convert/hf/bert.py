"""MegatronBertForPreTraining (norms before, arXiv 1909.08053) and BertForPreTraining (norms after, arXiv 1810.04805).

Both heads are converted: that of the masked tokens, and that of two classes over the pooled first token, which
transformers calls seq_relationship (Megatron-LM trains it on the order of two segments, the first BERT on whether they
are neighbours)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.evaluation.convert.hf.architecture import (
    SAME,
    Fields,
    ModelFamily,
    WeightRule,
    require_value,
    unsupported_fields,
    weight_and_bias,
)
from gristmill.training.config.layers import OutputConfig
from gristmill.training.config.model import ModelConfig

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


def rules(norms: Mapping[str, str], heads: Mapping[str, str]) -> list[WeightRule]:
    """The rules of embeddings and layers, and of heads: their linear layers by name."""
    all_rules = [
        WeightRule("bert.embeddings.word_embeddings.weight", ("embedding.weight",)),
        WeightRule("bert.embeddings.position_embeddings.weight", ("positions.weight",)),
        WeightRule("bert.embeddings.token_type_embeddings.weight", ("segments.weight",)),
    ]
    layers = {f"bert.encoder.layer.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in LAYER_NAMES.items()}
    for hf_name, ours in (layers | dict(norms) | dict(heads)).items():
        all_rules += weight_and_bias(hf_name, (ours,), SAME, SAME)
    return all_rules


def _pretraining_rules(norms: Mapping[str, str]) -> list[WeightRule]:
    return [*rules(norms, HEADS), WeightRule("cls.predictions.bias", ("head.bias",))]


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
        "ffn_hidden_size": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "segments": fields.get("type_vocab_size", 2),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-12),
        "gelu": "exact" if activation == "gelu" else "tanh",
    }


def unsupported(config: ModelConfig, constants: Mapping[str, Any]) -> list[str]:
    lacking = unsupported_fields(config, **constants, gelu=config.gelu, segments=config.segments)
    if config.num_kv_heads != config.heads:
        lacking.append(f"kv_heads={config.kv_heads}")
    if config.head_dim * config.heads != config.width:
        lacking.append(f"head_width={config.head_width}")
    return lacking


MEGATRON_BERT = ModelFamily(
    "MegatronBertForPreTraining",
    "megatron-bert",
    lambda config: unsupported(config, REARRANGED),
    lambda _: _pretraining_rules(REARRANGED_NORMS),
    write,
    lambda fields: read(fields, REARRANGED),
)
BERT = ModelFamily(
    "BertForPreTraining",
    "bert",
    lambda config: unsupported(config, ORIGINAL),
    lambda _: _pretraining_rules(ORIGINAL_NORMS),
    write,
    lambda fields: read(fields, ORIGINAL),
)


# Fine-tuned BERT in transformers: MegatronBertForSequenceClassification, ForMultipleChoice, ForQuestionAnswering,
# ForTokenClassification, and the same of the original order of norms (Bert...).
#
# These classes have no head for masked tokens and none for the order of sentences, so those weights are left out, and
# a model that is read has neither.

OUTPUT_NAME = "output_name"  # in config.json: the output's name in our model.outputs


@dataclass(frozen=True)
class Task:
    """A class of transformers by its ending, and the output that it holds. linear: its name there. fits: whether an
    output over `over` is one of this task."""

    ending: str
    linear: str
    over: Literal["pooled", "tokens"]
    default_name: str
    fits: Callable[[OutputConfig], bool]

    def problem(self, config: ModelConfig) -> list[str]:
        own = task_outputs(config)
        if len(own) != 1 or own[0].over != self.over or not self.fits(own[0]):
            return [f"outputs={[output.model_dump() for output in config.outputs]}"]
        return []


TASKS = (
    Task("ForMultipleChoice", "classifier", "pooled", "choice", lambda output: output.size == 1),
    Task("ForSequenceClassification", "classifier", "pooled", "classes", lambda output: output.size > 1),
    Task(
        "ForQuestionAnswering",
        "qa_outputs",
        "tokens",
        "span",
        lambda output: output.size == 2 and output.name == "span",
    ),
    Task("ForTokenClassification", "classifier", "tokens", "tags", lambda output: True),
)


@dataclass(frozen=True)
class NormPlacement:
    """One of the two orders of norms."""

    prefix: str
    model_type: str
    constants: Mapping[str, Any]
    norms: Mapping[str, str]


ORDERS = (
    NormPlacement("MegatronBert", "megatron-bert", REARRANGED, REARRANGED_NORMS),
    NormPlacement("Bert", "bert", ORIGINAL, ORIGINAL_NORMS),
)


def task_outputs(config: ModelConfig) -> list[OutputConfig]:
    """The outputs beside the sentence order's."""
    return [output for output in config.outputs if output != SENTENCE_ORDER]


def _family(order: NormPlacement, task: Task) -> ModelFamily:
    def lacks(config: ModelConfig) -> list[str]:
        free = {name: getattr(config, name) for name in ("outputs", "head_transform", "head_bias")}
        return unsupported(config, {**order.constants, **free}) + task.problem(config)

    def rules_of(config: ModelConfig) -> list[WeightRule]:
        heads = {task.linear: f"outputs.linear.{task_outputs(config)[0].name}"}
        if task.over == "pooled":
            heads["bert.pooler.dense"] = "outputs.pooler"
        return rules(order.norms, heads)

    def written(config: ModelConfig) -> Fields:
        (output,) = task_outputs(config)
        names = {str(number): f"LABEL_{number}" for number in range(output.size)}
        ids = {name: int(number) for number, name in names.items()}
        return {**write(config), "id2label": names, "label2id": ids, OUTPUT_NAME: output.name}

    def config_of(fields: Mapping[str, Any]) -> Fields:
        size = len(fields["id2label"]) if fields.get("id2label") else int(fields.get("num_labels", 2))
        name = fields.get(OUTPUT_NAME, task.default_name)
        output = OutputConfig(name=name, size=1 if task.ending == "ForMultipleChoice" else size, over=task.over)
        headless = {"outputs": (output,), "head_transform": False, "head_bias": False}
        return read(fields, {**order.constants, **headless})

    return ModelFamily(f"{order.prefix}{task.ending}", order.model_type, lacks, rules_of, written, config_of)


BERT_TASKS = tuple(_family(order, task) for order in ORDERS for task in TASKS)
