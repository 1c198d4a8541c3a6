"""Checks before allocation that the state of a model fits in memory. No torch here."""

import os

from gristmill.foundation.errors import InputError
from gristmill.training.config import TrainConfig
from gristmill.training.costs.host_update import device_share
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.costs.parameters import expert_parameter_count, parameter_count
from gristmill.training.model_config import ModelConfig
from gristmill.training.planner.host import planned_stride

# Weights, gradients and one moment of the optimizer, four bytes each (fp32; training/parallel/precision.py). AdamW has
# a second moment, and activations come on top: what is refused for this could not be trained in any case.
MIN_BYTES_PER_PARAMETER = 12
WEIGHT_BYTES = 4
PLANNED_SUBGROUPS = 24  # more change the placement no further
LARGEST_DEVICE_BYTES = 2**40  # no accelerator has a TiB of its own; where the device is not known, this is refused


def min_process_bytes(model: ModelConfig, train: TrainConfig, vocab_size: int) -> int:
    """Minimum bytes of one process's parameters, gradients and optimizer state on its device, sharded evenly. 1e9 over
    4 -> 3e9; with the state in host memory 1e9."""
    each = WEIGHT_BYTES if train.layout.offload.active else MIN_BYTES_PER_PARAMETER
    return int(process_parameters(model, train, vocab_size) * each)


def process_parameters(model: ModelConfig, train: TrainConfig, vocab_size: int) -> float:
    """Parameters of one process, sharded evenly."""
    layout, shape = train.layout, shape_of(model, vocab_size)
    experts = expert_parameter_count(shape)
    shares = layout.tensor * layout.pipeline * layout.shard
    expert_shares = layout.pipeline * layout.stage_ranks // layout.expert_replicate
    return (parameter_count(shape) - experts) / shares + experts / expert_shares


def check_memory(model: ModelConfig, train: TrainConfig, vocab_size: int, memory_bytes: int) -> None:
    """Raises InputError if the model cannot be trained in memory_bytes of a process's device."""
    needed = min_process_bytes(model, train, vocab_size)
    if needed > memory_bytes:
        raise InputError(
            f"the model has {parameter_count(shape_of(model, vocab_size)):,} parameters: its weights, gradients and "
            f"optimizer take at least {needed / 2**30:,.1f} GiB on each process, which has {memory_bytes / 2**30:,.1f} "
            "GiB; lower model.layers or model.width, or use more processes (`gristmill layout` proposes a layout)"
        )


def host_bytes_per_parameter(train: TrainConfig, parameters: float) -> float:
    """Bytes in host memory of each of a process's parameters under `layout.offload`: the optimizer's state in fp32, and
    of what the host updates the weight and the gradient. AdamW on the host alone: 16."""
    offload = train.layout.offload
    if not offload.active:
        return 0.0
    stride = None
    if offload.optimizer == "auto":
        count = min(max(1, round(parameters / offload.subgroup_parameters)), PLANNED_SUBGROUPS)
        stride = planned_stride(train.layout.hardware, [parameters / count] * count)
    state = 4 if train.optimizer.name == "muon" else 8
    return state + 2 * WEIGHT_BYTES * (1 - device_share(offload, stride))


def check_host_memory(
    model: ModelConfig, train: TrainConfig, vocab_size: int, processes: int, memory_bytes: int
) -> None:
    """Raises InputError if what `layout.offload` keeps in host memory does not fit beside the other processes of this
    machine."""
    parameters = process_parameters(model, train, vocab_size)
    each = host_bytes_per_parameter(train, parameters)
    if parameters * each * processes <= memory_bytes:
        return
    fits = int(memory_bytes / each / processes)
    raise InputError(
        f"layout.offload keeps {parameters * each / 2**30:,.1f} GiB of optimizer state in host memory for each of "
        f"{processes} processes ({parameters:,.0f} parameters, {each:g} bytes each), and this machine has "
        f"{memory_bytes / 2**30:,.1f} GiB; at most {fits:,} parameters a process fit: shard the model over more "
        "machines (data, tensor, pipeline), lower model.layers or model.width, or set offload.optimizer: none"
    )


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
