"""Rates of a host beside its device, from the hardware profile."""

from collections.abc import Sequence

from gristmill.training.costs.host_update import HostRates, best_stride, device_share, on_device, update_seconds
from gristmill.training.offload_config import OffloadConfig
from gristmill.training.planner.hardware import Hardware, load_hardware

# Reads and writes of one update of AdamW in fp32: weight, gradient and two moments are read, all but the gradient
# written.
UPDATE_BYTES = 28


def host_rates(hardware: Hardware) -> HostRates:
    """Of one GPU and its share of the host."""
    device = hardware.device.memory_tb_per_second * 1e12 * hardware.device.memory_efficiency / UPDATE_BYTES
    return HostRates(
        hardware.host_link.bytes_per_second,
        hardware.host_update_gparams_per_second * 1e9,
        device,
        hardware.host_contention,
    )


def planned_stride(hardware: str, sizes: Sequence[float]) -> int | None:
    """The stride of `optimizer: auto` on this profile; None: the host updates all subgroups."""
    return best_stride(sizes, host_rates(load_hardware(hardware)))


def offloaded_update(offload: OffloadConfig, rates: HostRates) -> tuple[float, float]:
    """(share of the parameters that the device updates, seconds of a step for each parameter), with 24 subgroups: more
    change the placement no further."""
    if not offload.active:
        return 0.0, 0.0
    sizes = [1e8] * 24
    stride = best_stride(sizes, rates) if offload.optimizer == "auto" else None
    seconds = update_seconds(sizes, on_device(len(sizes), offload, stride), rates)
    return device_share(offload, stride), seconds / sum(sizes)
