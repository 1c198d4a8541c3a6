"""Peak FLOP/s of a device: the denominator of model FLOP utilisation (MFU)."""

import torch

# Dense bf16 matrix peaks in FLOP/s, from the vendors' data sheets (the sparse figures are twice these).
BF16_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def device_peak(device: torch.device) -> float | None:
    """bf16 FLOP/s of one device; None for a device that is not in BF16_PEAKS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAKS.items() if key in name), None)
