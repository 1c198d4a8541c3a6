"""Chooses how SSD's scan is computed: the Triton kernels of mamba_ssm where that package is installed, else the chunked
scan of ssd.py, compiled on GPUs and as it is on CPUs. On a GPU unmeasured."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gristmill.training.model.ssd import ScanInputs, ssd

PACKAGE = "mamba_ssm"
KERNELS = "mamba_ssm.ops.triton.ssd_combined"


def scan(inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """(y_BTHP, the state after the last token), as `ssd` gives them. A single token is one step of the recurrence."""
    if state_BHPN is not None and inputs.x_BTHP.shape[1] == 1:
        return step(inputs, state_BHPN)
    backend = backend_for(inputs.x_BTHP.device.type, inputs.x_BTHP.dtype)
    if backend == PACKAGE:
        return by_kernels(importlib.import_module(KERNELS), inputs, chunk, state_BHPN)
    return (_compiled() if backend == "compiled" else ssd)(inputs, chunk, state_BHPN)


def step(inputs: ScanInputs, state_BHPN: Tensor) -> tuple[Tensor, Tensor]:
    """One token of decoding: S = exp(dt A) S + dt x B^T, y = S C."""
    heads = inputs.A_H.shape[0] // inputs.B_BTGN.shape[2]
    B_BHN, C_BHN = (part[:, 0].repeat_interleave(heads, dim=1) for part in (inputs.B_BTGN, inputs.C_BTGN))
    dt_BH = inputs.dt_BTH[:, 0]
    added_BHP = inputs.x_BTHP[:, 0] * dt_BH.unsqueeze(-1)
    decay_BH11 = (dt_BH * inputs.A_H).exp()[..., None, None]
    state_BHPN = torch.addcmul(state_BHPN * decay_BH11, added_BHP.unsqueeze(-1), B_BHN.unsqueeze(-2))
    return (state_BHPN @ C_BHN.unsqueeze(-1)).squeeze(-1).unsqueeze(1), state_BHPN


def backend_for(device: str, dtype: torch.dtype) -> str:
    """mamba_ssm, compiled or plain. float64 is for comparisons, so nothing is approximated there."""
    if device != "cuda" or dtype == torch.float64:
        return "plain"
    return PACKAGE if importlib.util.find_spec(PACKAGE) is not None else "compiled"


def by_kernels(kernels: Any, inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """kernels: the module of mamba_ssm, whose chunks have a power of two of tokens, 16 at least. Its steps come with
    bias and softplus done, and its documents are numbered from 0 in each row."""
    documents_BT = inputs.documents_BT
    if documents_BT is not None:
        starts_BT = torch.nn.functional.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
        documents_BT = starts_BT.cumsum(dim=1).int()
    return kernels.mamba_chunk_scan_combined(
        inputs.x_BTHP,
        inputs.dt_BTH,
        inputs.A_H,
        inputs.B_BTGN,
        inputs.C_BTGN,
        chunk_size=max(16, 1 << (chunk.bit_length() - 1)),
        initial_states=state_BHPN,
        seq_idx=documents_BT,
        return_final_states=True,
    )


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(ssd)
