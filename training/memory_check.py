"""Checks before allocation that the state of a model fits in memory. No torch here."""

import os

from gristmill.foundation.errors import InputError
from gristmill.training.config import TrainConfig
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.costs.parameters import expert_parameter_count, parameter_count
from gristmill.training.model_config import ModelConfig

# Weights, gradients and one moment of the optimizer, four bytes each (fp32; training/parallel/precision.py). AdamW has
# a second moment, and activations come on top: what is refused for this could not be trained in any case.
MIN_BYTES_PER_PARAMETER = 12
LARGEST_DEVICE_BYTES = 2**40  # no accelerator has a TiB of its own; where the device is not known, this is refused


def min_process_bytes(model: ModelConfig, train: TrainConfig, vocab_size: int) -> int:
    """Minimum bytes of one process's parameters, gradients and optimizer state, sharded evenly. 1e9 over 4 -> 3e9."""
    layout, shape = train.layout, shape_of(model, vocab_size)
    experts = expert_parameter_count(shape)
    shares = layout.tensor * layout.pipeline * layout.shard
    expert_shares = layout.pipeline * layout.stage_ranks // layout.expert_replicate
    numbers = (parameter_count(shape) - experts) / shares + experts / expert_shares
    return int(numbers * MIN_BYTES_PER_PARAMETER)


def check_memory(model: ModelConfig, train: TrainConfig, vocab_size: int, memory_bytes: int) -> None:
    """Raises InputError if the model cannot be trained in memory_bytes of a process's device."""
    needed = min_process_bytes(model, train, vocab_size)
    if needed > memory_bytes:
        raise InputError(
            f"the model has {parameter_count(shape_of(model, vocab_size)):,} parameters: its weights, gradients and "
            f"optimizer take at least {needed / 2**30:,.1f} GiB on each process, which has {memory_bytes / 2**30:,.1f} "
            "GiB; lower model.layers or model.width, or use more processes (`gristmill layout` proposes a layout)"
        )


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
