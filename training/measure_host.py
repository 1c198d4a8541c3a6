"""Measure the host beside a device: its updates of parameters, and the link between them."""

import threading

import torch
from torch.optim.adamw import adamw

from gristmill.foundation.torchrun_variables import torchrun_variable
from gristmill.training.timing import finish, median_seconds

HOST = torch.device("cpu")
# fp32 weight, gradient and two moments of so many parameters: more than the caches of a host beside a GPU hold (1 GiB).
CUDA_PARAMETERS, CPU_PARAMETERS = 2**26, 2**22
COPIED_BYTES = 2**26


def measure_host_update(device: torch.device, repeats: int) -> tuple[float, float]:
    """(parameters a second that the host updates with AdamW, how many times as long while another thread copies to the
    device): the rate and the contention of an optimizer whose state is in host memory."""
    parameters = CUDA_PARAMETERS if device.type == "cuda" else CPU_PARAMETERS
    tensors = [torch.zeros(parameters) for _ in range(4)]
    source, target = _buffers(device)
    done = threading.Event()

    def copy() -> None:
        while not done.is_set():
            target.copy_(source)
            finish(device)

    def update() -> None:
        weight, gradient, first, second = ([tensor] for tensor in tensors)
        numbers = {"beta1": 0.9, "beta2": 0.95, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
        options = {"fused": True, "amsgrad": False, "maximize": False}
        adamw(weight, gradient, first, second, [], [torch.zeros(())], **options, **numbers)

    alone = median_seconds(update, HOST, repeats, alone=False)
    copier = threading.Thread(target=copy)
    copier.start()
    try:
        beside = median_seconds(update, HOST, repeats, alone=False)
    finally:
        done.set()
        copier.join()
    return parameters / alone, beside / alone


def measure_host_link(device: torch.device, repeats: int) -> float:
    """Bytes a second of a copy between the host's memory (pinned beside a GPU) and the device's, in the slower
    direction. On a CPU of a copy in memory."""
    host, other = _buffers(device)
    seconds = [
        median_seconds(lambda: other.copy_(host, non_blocking=True), device, repeats),
        median_seconds(lambda: host.copy_(other, non_blocking=True), device, repeats),
    ]
    return host.nbytes / max(seconds)


def processes_here() -> int:
    """Processes that share this machine's host."""
    return torchrun_variable("LOCAL_WORLD_SIZE", 1)


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(in host memory, on the device)."""
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host, torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
