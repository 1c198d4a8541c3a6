"""Distributed checkpoints of Megatron-Core (format torch_dist): .metadata, common.pt and .distcp files of a folder like
iter_0000010.

.metadata and common.pt are pickles, of which only listed classes are read. Tensors are global: layers are stacked in
one tensor, of which a layer is read at a time, or named one by one; the shards of tensor ranks are its chunks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    linear_rules,
    norm_rules,
    weight_and_bias,
)
from gristmill.evaluation.convert.hf.olmo_phi import HALVES
from gristmill.evaluation.convert.hf.opt_bloom_falcon import GROUPED
from gristmill.evaluation.convert.safetensors_folder import WeightSource, converted_source
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.restricted_pickle import load_restricted, read_metadata_pickle
from gristmill.training.config.layers import GATED
from gristmill.training.config.model import ModelConfig

METADATA_NAME, COMMON_NAME, FORMAT_NAME = ".metadata", "common.pt", "metadata.json"
LATEST_NAME = "latest_checkpointed_iteration.txt"
FORMAT = "torch_dist"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
LAYERS = "decoder.layers."
# Transformer Engine keeps a norm in the linear layer behind it.
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


class DistributedFolder(Mapping[str, Tensor]):
    """Tensors by name, decoder.layers.N for each layer. A tensor is read from its chunks when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.metadata = read_metadata_pickle(folder / METADATA_NAME)
        self._place: dict[str, tuple[str, int | None]] = {}  # key, layer of a stacked tensor
        self.meta: dict[str, Tensor] = {}
        for key, stated in self.metadata.state_dict_metadata.items():
            if not key.startswith(MODEL_KEYS) or not isinstance(stated, TensorStorageMetadata):
                continue
            stacked = key.startswith(LAYERS) and not key.removeprefix(LAYERS).split(".")[0].isdigit()
            for layer in range(stated.size[0]) if stacked else (None,):
                shape = stated.size if layer is None else stated.size[1:]
                name = _plain_name(key if layer is None else f"{LAYERS}{layer}.{key.removeprefix(LAYERS)}")
                self._place[name] = (key, layer)
                self.meta[name] = torch.empty(shape, dtype=stated.properties.dtype, device="meta")
        self.files = tuple(sorted({folder / stored.relative_path for stored in self.metadata.storage_data.values()}))
        for path in self.files:
            if path.parent != folder or not path.is_file():
                raise InputError(f"{path}: absent, but {METADATA_NAME} names it; fetch the file")

    def __getitem__(self, name: str) -> Tensor:
        key, layer = self._place[name]
        tensor, filled = torch.empty_like(self.meta[name], device="cpu"), 0
        stored = self.metadata.state_dict_metadata[key]
        chunks = [] if isinstance(stored, BytesStorageMetadata) else stored.chunks
        for index, chunk in enumerate(chunks):
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            part = self._chunk(key, offsets, index)
            if layer is not None:
                part, offsets, sizes = part[layer - offsets[0]], offsets[1:], sizes[1:]
            target = tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            target.copy_(part)
            filled += part.numel()
        if filled != tensor.numel():
            raise InputError(f"{self.folder}: the chunks of {key} do not fill it; fetch the folder again")
        return tensor

    def _chunk(self, key: str, offsets: tuple[int, ...], index: int) -> Tensor:
        stored = self.metadata.storage_data
        place = stored.get(MetadataIndex(key, torch.Size(offsets), index)) or stored.get(
            MetadataIndex(key, torch.Size(offsets))
        )
        if place is None or getattr(place, "transform_descriptors", None):
            raise InputError(f"{self.folder}: no plain chunk of {key} at {list(offsets)}; fetch the folder again")
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        tensor = load_restricted(path, content, kind=Tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def _plain_name(name: str) -> str:
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def _iteration(folder: Path) -> Path:
    """The folder of the last iteration, where `folder` holds several."""
    try:
        latest = (folder / LATEST_NAME).read_text().strip()
    except (OSError, ValueError):
        return folder
    return folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else "release")


def is_megatron_core(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    place = _iteration(folder)
    return (place / FORMAT_NAME).is_file() and (place / COMMON_NAME).is_file()


def open_megatron_core(folder: Path) -> WeightSource:
    """Raises InputError naming what is absent, unsupported or damaged."""
    place = _iteration(folder)
    try:
        stated = json.loads((place / FORMAT_NAME).read_bytes())
        kind = stated["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{place / FORMAT_NAME}: does not name the format ({error}); fetch the file again") from error
    if kind != FORMAT:
        raise InputError(f"{place / FORMAT_NAME}: sharded_backend is {kind!r}; gristmill reads {FORMAT!r}")
    common = load_restricted(place / COMMON_NAME)
    if common.get("args") is None:
        raise InputError(f"{place / COMMON_NAME}: has no args, which say how many heads the model has; fetch it again")
    config = config_of(place / COMMON_NAME, common["args"])
    weights = DistributedFolder(place)
    table = weights.meta.get("embedding.word_embeddings.weight")
    if table is None:
        raise InputError(f"{place}: no embedding.word_embeddings.weight; this is not a checkpoint of a GPTModel")
    return converted_source(place, GPT_MODEL, config, (len(table), 0), (weights, weights.meta, weights.files))


# Megatron-Core's GPTModel and our transformer. Its norms and projections are the usual ones; the rows of a group of
# heads lie together (queries, key, value), and gate and up behind each other.

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


def _rules(config: ModelConfig) -> list[WeightRule]:
    hf_name, ours = "decoder.layers.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{hf_name}.self_attention.linear_qkv", triple, GROUPED, GROUPED)
    rules = packed if config.projection_biases else packed[:1]
    rules += linear_rules({f"{hf_name}.self_attention.linear_proj": f"{ours}.mixer.output"}, config.output_biases)
    if config.mlp in GATED:
        both = weight_and_bias(f"{hf_name}.mlp.linear_fc1", (f"{ours}.mlp.gate", f"{ours}.mlp.up"), HALVES, HALVES)
        rules += both if config.mlp_biases else both[:1]
    else:
        rules += linear_rules({f"{hf_name}.mlp.linear_fc1": f"{ours}.mlp.up"}, config.mlp_biases)
    rules += linear_rules({f"{hf_name}.mlp.linear_fc2": f"{ours}.mlp.down"}, config.mlp_biases)
    norms = {
        f"{hf_name}.input_layernorm": f"{ours}.mixer_norm",
        f"{hf_name}.pre_mlp_layernorm": f"{ours}.mlp_norm",
        "decoder.final_layernorm": "final_norm",
    }
    if config.qk_norm:
        norms |= {f"{hf_name}.self_attention.{name}_layernorm": f"{ours}.mixer.{own}_norm" for name, own in QK.items()}
    rules += norm_rules(config, norms)
    rules.append(WeightRule("embedding.word_embeddings.weight", ("embedding.weight",)))
    if config.positions == "learned":
        rules.append(WeightRule("embedding.position_embeddings.weight", ("positions.weight",)))
    return rules if config.tied_embeddings else [*rules, WeightRule("output_layer.weight", ("head.weight",))]


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
        "ffn_hidden_size": getattr(arguments, "ffn_hidden_size", None) or 4 * width,
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


def _no_transformers_form(_: Mapping[str, Any] | ModelConfig) -> Any:
    raise NotImplementedError("Megatron-Core's checkpoints are read, by open_megatron_core, and not written")


GPT_MODEL = ModelFamily(
    "GPTModel", "megatron-core", _no_transformers_form, _rules, _no_transformers_form, _no_transformers_form
)
