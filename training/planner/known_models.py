"""Models of the literature by name, and model files, to plan a layout without a recipe."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import RecipeError, nearest_name
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, gpt, shape_of

# (layers, width, heads) of arXiv 2104.04473, table 1; its vocabulary is 51200 and its sequence length 2048.
_GPT = {
    "gpt-1.7b": (24, 2304, 24),
    "gpt-3.6b": (30, 3072, 32),
    "gpt-7.5b": (36, 4096, 32),
    "gpt-18b": (40, 6144, 48),
    "gpt-39b": (48, 8192, 64),
    "gpt-76b": (60, 10240, 80),
    "gpt-146b": (80, 12288, 96),
    "gpt3-175b": (96, 12288, 96),
    "gpt-310b": (96, 16384, 128),
    "mt-nlg-530b": (105, 20480, 128),
    "gpt-1t": (128, 25600, 160),
}
# (layers, width, heads, key/value heads, hidden width) of arXiv 2407.21783, table 3; vocabulary 128256, 8192 tokens.
_LLAMA3 = {
    "llama3-8b": (32, 4096, 32, 8, 14336),
    "llama3-70b": (80, 8192, 64, 8, 28672),
    "llama3-405b": (126, 16384, 128, 8, 53248),
}
# config.json of the published weights: mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B-Base, Qwen/Qwen3-235B-A22B;
# vocabulary, and fields of the model at its planned sequence length of 4096.
_MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral-8x7b": (
        32000,
        {
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "ffn_hidden_size": 14336,
            "moe": {"experts": 8, "top_k": 2},
        },
    ),
    "qwen3-30b-a3b": (
        151936,
        {"layers": 48, "width": 2048, "heads": 32, "moe": {"experts": 128, "top_k": 8, "ffn_hidden_size": 768}},
    ),
    "qwen3-235b-a22b": (
        151936,
        {"layers": 94, "width": 4096, "heads": 64, "moe": {"experts": 128, "top_k": 8, "ffn_hidden_size": 1536}},
    ),
}
_QWEN3 = {"kv_heads": 4, "head_width": 128, "qk_norm": True}
MODEL_NAMES = (*_GPT, *_LLAMA3, *_MIXTURES)


def named_shape(name: str, sequence_length: int | None = None) -> ModelShape:
    """Raises RecipeError with the nearest name."""
    if name in _GPT:
        return gpt(*_GPT[name], sequence_length=sequence_length or 2048)
    if name in _LLAMA3:
        layers, width, heads, kv_heads, hidden = _LLAMA3[name]
        model = ModelConfig(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            ffn_hidden_size=hidden,
            sequence_length=sequence_length or 8192,
        )
        return shape_of(model, 128256)
    if name in _MIXTURES:
        vocab, fields = _MIXTURES[name]
        family = _QWEN3 if name.startswith("qwen3") else {}
        return shape_of(ModelConfig(**fields, **family, sequence_length=sequence_length or 4096), vocab)
    near = nearest_name(name, MODEL_NAMES, cutoff=0.3)
    hint = f"did you mean {near}? " if near else ""
    raise RecipeError(f"--model {name}: no such file or name; {hint}names are {', '.join(MODEL_NAMES)}")


def load_shape(reference: str, sequence_length: int | None = None, vocab: int | None = None) -> ModelShape:
    """The shape of a name, or of a YAML file: a recipe's (`model`, `tokenizer.vocab_size`) or a model's bare fields.

    Raises RecipeError where the file, a field or the vocabulary is missing or wrong."""
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml"):
        shape = named_shape(reference, sequence_length)
        return shape if vocab is None else shape_of(shape.model, vocab, sequence_length)
    content = _read(path)
    fields = dict(content.get("model", content))
    size = vocab or fields.pop("vocab_size", None) or _section(content, "tokenizer").get("vocab_size")
    if not isinstance(size, int):
        raise RecipeError(f"{path}: no tokenizer.vocab_size; add it, or give --vocab")
    fields.pop("vocab_size", None)
    if sequence_length is not None:
        fields["sequence_length"] = sequence_length
    try:
        return shape_of(ModelConfig(**fields), size)
    except (ValidationError, TypeError) as error:
        raise RecipeError(f"{path}: {_sentences(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_bytes(), str(path)).value
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: holds no fields; begin with layers, width, heads")
    return content


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _sentences(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problems = []
    for detail in error.errors():
        place = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            near = nearest_name(place, ModelConfig.model_fields, cutoff=0.3)
            hint = f"did you mean {near}?" if near else f"fields are {', '.join(ModelConfig.model_fields)}"
            problems.append(f"unknown field {place}; {hint}")
        else:
            problems.append(f"{place}: {detail['msg']}" if place else detail["msg"])
    return "; ".join(problems)
