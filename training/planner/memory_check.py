"""Checks before allocation that the state of a model fits in memory. No torch here."""

import os
import shutil
from collections import Counter
from pathlib import Path

from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.activations import ElementSizes
from gristmill.training.planner.costs.host_update import device_share, planned_stride
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import expert_parameter_count, parameter_count
from gristmill.training.planner.framework import GRISTMILL
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import RankLayers, from_config
from gristmill.training.planner.layout_checks import micro_batch_size
from gristmill.training.planner.memory import LAYERS_HELD, Memory, MemoryModel

# Weights, gradients and one moment of the optimizer, four bytes each (fp32; training/engine/local_model.py). AdamW has
# a second moment, and activations come on top: what is refused for this could not be trained in any case.
MIN_BYTES_PER_PARAMETER = 12
WEIGHT_BYTES = 4
PLANNED_SUBGROUPS = 24  # more change the placement no further
PRECISION_BYTES = {"bf16": (2, 4), "fp16": (2, 4), "fp32": (4, 4), "fp64": (8, 8)}  # computation, stored
LARGEST_DEVICE_BYTES = 2**40  # no accelerator has a TiB of its own; where the device is not known, this is refused


def min_process_bytes(model: ModelConfig, train: TrainConfig, vocab_size: int) -> int:
    """Minimum bytes of one process's parameters, gradients and optimizer state on its device, sharded evenly. 1e9 over
    4 -> 3e9; with the state in host memory 1e9; with the layers' weights there or on disk, that of embedding, head and
    two layers."""
    if train.layout.offload.streams_weights:
        stated = stated_memory(model, train, vocab_size)
        return int(stated.parameters + stated.gradients)
    parameter_bytes = WEIGHT_BYTES if train.layout.offload.active else MIN_BYTES_PER_PARAMETER
    return int(process_parameters(model, train, vocab_size) * parameter_bytes)


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


def stated_memory(model: ModelConfig, train: TrainConfig, vocab_size: int, cuda: bool = False) -> Memory:
    """The forecast memory of the rank that needs the most, by part: with the layers' weights in host memory or on disk
    what the run states before its first step. On a CPU it is what the process takes beyond its libraries."""
    layout = train.layout
    shape, micro_batch = shape_of(model, vocab_size), micro_batch_size(model, train)
    sizes = ElementSizes(*PRECISION_BYTES[train.precision], cuda=cuda, float8=train.float8 and not train.compile)
    memories = MemoryModel(shape, GRISTMILL.with_optimizer(train.optimizer.name), sizes, layout.offload)
    ranks = [RankLayers(tuple(Counter(shape.kinds)[kind] for kind in range(len(shape.distinct))), True, True)]
    planned = from_config(layout, micro_batch)
    samples = train.batch_tokens // model.sequence_length
    return memories.fullest(planned, ranks, planned.microbatches(samples))


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
    if train.layout.offload.streams_weights:
        needed = stated_memory(model, train, vocab_size).host
        _check_room(needed, parameters, processes, memory_bytes, "host memory")
        return
    parameter_bytes = host_bytes_per_parameter(train, parameters)
    if parameters * parameter_bytes * processes <= memory_bytes:
        return
    fits = int(memory_bytes / parameter_bytes / processes)
    raise InputError(
        f"layout.offload keeps {parameters * parameter_bytes / 2**30:,.1f} GiB of optimizer state in host memory for "
        f"each of {processes} processes ({parameters:,.0f} parameters, {parameter_bytes:g} bytes each), and this "
        "machine has "
        f"{memory_bytes / 2**30:,.1f} GiB; at most {fits:,} parameters a process fit: shard the model over more "
        "machines (data, tensor, pipeline), lower model.layers or model.width, or set offload.optimizer: none"
    )


def check_disk(model: ModelConfig, train: TrainConfig, vocab_size: int, processes: int) -> None:
    """Raises InputError if weights on disk do not fit in their folder's free space beside those of the other processes
    of this machine."""
    needed, folder = stated_memory(model, train, vocab_size).disk, Path(train.layout.offload.folder or ".").absolute()
    if not needed:
        return
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    _check_room(needed, process_parameters(model, train, vocab_size), processes, free, f"the disk of {folder}")


def _check_room(needed: float, parameters: float, processes: int, free: int, place: str) -> None:
    if needed * processes <= free:
        return
    fits = int(free / processes / needed * parameters)
    raise InputError(
        f"layout.offload.parameters keeps {needed / 2**30:,.1f} GiB of weights, gradients and optimizer state of each "
        f"of {processes} processes ({parameters:,.0f} parameters) on {place}, which has {free / 2**30:,.1f} GiB; at "
        f"most {fits:,} parameters a process fit: shard the model over more machines (data, tensor), lower "
        "model.layers or model.width, or take another place (offload.parameters, offload.folder)"
    )


def memory_statement(memory: Memory) -> str:
    """Sentence that a run with streamed weights prints before its first step."""
    place, size = ("on disk", memory.disk) if memory.disk else ("in host memory", memory.host)
    parts = {
        f"embedding, head and {LAYERS_HELD} layers": memory.parameters,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "logits": memory.logits,
        "buffers": memory.buffers,
    }
    return (
        f"the layers' weights are {place} ({size / GIB:.2f} GiB with gradients and optimizer state), at most "
        f"{LAYERS_HELD} layers' at a time on the device. Stated peak memory, beside the libraries' own: "
        f"{memory.total / GIB:.3f} GiB ({', '.join(f'{name} {part / GIB:.3f}' for name, part in parts.items())})"
    )


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
