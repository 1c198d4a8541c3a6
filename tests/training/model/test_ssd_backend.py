"""Where the scan's backend is chosen, what mamba_ssm's kernels are given, and that the plain scan can be compiled."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.training.model.ssd import ScanInputs, ssd
from gristmill.training.model.ssd_backend import backend_for, by_kernels, scan


def inputs_of(tokens: int, documents: Tensor | None = None) -> ScanInputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps, decay = torch.rand(2, tokens, 4, generator=generator, dtype=torch.float64), -draw(4).abs()
    return ScanInputs(draw(2, tokens, 4, 3), steps, decay, draw(2, tokens, 2, 5), draw(2, tokens, 2, 5), documents)


def test_the_backend_follows_device_precision_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend_for("cpu", torch.float32) == "plain"
    assert backend_for("cuda", torch.float64) == "plain"
    assert backend_for("cuda", torch.float32) == "compiled"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    assert backend_for("cuda", torch.float32) == "mamba_ssm"
    assert backend_for("cpu", torch.float32) == "plain"


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """mamba_chunk_scan_combined's signature and meaning (mamba_ssm, ops/triton/ssd_combined.py), token by token."""
    assert chunk_size & (chunk_size - 1) == 0 and chunk_size >= 16 and return_final_states
    rows, tokens, heads, _ = x.shape
    B, C = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (B, C))
    state = torch.zeros(rows, heads, x.shape[3], B.shape[3], dtype=x.dtype)
    state = state if initial_states is None else initial_states
    outputs = []
    for t in range(tokens):
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and not seq_idx[:, 0].any()
            state = state * (seq_idx[:, t] == seq_idx[:, max(t - 1, 0)])[:, None, None, None]
        added = dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None]
        state = torch.exp(dt[:, t] * A)[..., None, None] * state + added
        outputs.append((state * C[:, t, :, None]).sum(dim=-1))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_the_kernels_are_given_what_the_plain_scan_is(packed: bool, continued: bool) -> None:
    documents = torch.tensor([[7] * 4 + [9] * 5, [3] * 9]) if packed else None
    inputs, state = inputs_of(9, documents), torch.randn(2, 4, 3, 5, dtype=torch.float64) if continued else None
    kernels = SimpleNamespace(mamba_chunk_scan_combined=recurrence)
    for found, expected in zip(by_kernels(kernels, inputs, 20, state), scan(inputs, 4, state), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_token_is_a_step_of_the_scan() -> None:
    inputs, state = inputs_of(1), torch.randn(2, 4, 3, 5, dtype=torch.float64)
    for found, expected in zip(scan(inputs, 4, state), ssd(inputs, 4, state), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow  # loading torch's compiler
def test_the_plain_scan_is_one_graph() -> None:
    """So that torch.compile fuses it whole; the eager backend traces it and compiles nothing."""
    inputs = inputs_of(12, torch.tensor([[0] * 5 + [1] * 7, [0] * 12]))
    compiled = torch.compile(ssd, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(inputs, 4), ssd(inputs, 4), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
