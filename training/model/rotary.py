"""Rotary positions (RoFormer, arXiv 2104.09864), also for contexts longer than those of pretraining."""

import math

import torch
from torch import Tensor

from gristmill.training.rope_config import RopeScaling

# B batch, T tokens, H heads, K head width


def rotary_angles(
    positions_BT: Tensor, head_width: int, base: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, T, K] for `rotate`. Feature i turns with feature i + K / 2."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, head_width, 2, device=positions_BT.device, dtype=exact) / head_width
    frequencies, factor = base**-exponent, 1.0
    if scaling is not None:
        frequencies, factor = _scaled(frequencies, base, scaling)
    angles = positions_BT.unsqueeze(-1).to(exact) * frequencies
    angles_BTK = torch.cat([angles, angles], dim=-1)
    cosine, sine = angles_BTK.cos(), angles_BTK.sin()
    if factor != 1.0:
        cosine, sine = cosine * factor, sine * factor
    return cosine.to(dtype), sine.to(dtype)


def rotate(x_BTHK: Tensor, rotation_BTK: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first features of each head, as many as there are angles; the others stay as they are."""
    turned = rotation_BTK[0].shape[-1]
    if turned < x_BTHK.shape[-1]:
        first, rest = x_BTHK.split((turned, x_BTHK.shape[-1] - turned), dim=-1)
        return torch.cat([rotate(first, rotation_BTK), rest], dim=-1)
    cosine, sine = (part.unsqueeze(2) for part in rotation_BTK)
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.addcmul(x_BTHK * cosine, torch.cat([-second, first], dim=-1), sine)


def _scaled(frequencies: Tensor, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """(frequencies [K / 2] in radians a token, factor of cosine and sine)."""
    lowered = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return lowered, 1.0
    if scaling.rope_type == "ntk":
        larger = scaling.ntk_base(base, 2 * len(frequencies))
        return frequencies ** (math.log(larger) / math.log(base)), 1.0
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * lowered + kept * frequencies, 1.0
    first, last = _yarn_features(2 * len(frequencies), base, scaling)
    places = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    kept = 1 - ((places - first) / max(last - first, 1e-3)).clamp(0, 1)
    return (1 - kept) * lowered + kept * frequencies, scaling.rotation_factor


def _yarn_features(head_width: int, base: float, scaling: RopeScaling) -> tuple[int, int]:
    """The features that turn beta_fast and beta_slow times within the original length, rounded outwards."""
    length = scaling.original_max_position_embeddings

    def feature(turns: float) -> float:
        return head_width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    return max(math.floor(feature(scaling.beta_fast)), 0), min(math.ceil(feature(scaling.beta_slow)), head_width - 1)
