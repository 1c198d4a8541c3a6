"""Opens a folder with a model in any of the formats that `gristmill import` reads."""

from pathlib import Path

from gristmill.evaluation.models.conversion.megatron_345m import megatron_files, read_megatron_345m
from gristmill.evaluation.models.huggingface import is_huggingface, open_huggingface
from gristmill.evaluation.models.megatron_core import is_megatron_core, open_megatron_core
from gristmill.evaluation.models.megatron_deepspeed import is_megatron_deepspeed, open_megatron_deepspeed
from gristmill.evaluation.models.weight_source import WeightSource, check_shapes


def open_source(folder: Path) -> WeightSource:
    """A Hugging Face folder, NVIDIA's megatron-gpt2-345m or megatron-bert-345m, a Megatron-DeepSpeed BLOOM, or a
    distributed checkpoint of Megatron-Core. Raises InputError naming what is absent, unsupported or damaged."""
    if is_megatron_deepspeed(folder):
        return open_megatron_deepspeed(folder)
    if is_megatron_core(folder):
        return open_megatron_core(folder)
    if not is_huggingface(folder) and (files := megatron_files(folder)):
        return _open_megatron_345m(files)
    return open_huggingface(folder)


def _open_megatron_345m(files: list[Path]) -> WeightSource:
    found = read_megatron_345m(files)
    check_shapes(files[0], found.config, found.vocab_size, found.tensors)
    names, stream = tuple(found.tensors), found.tensors.items
    return WeightSource(found.name, found.config, found.vocab_size, 0, tuple(files), names, lambda: iter(stream()))
