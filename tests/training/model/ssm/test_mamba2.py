"""Mamba-2: the chunked scan is the recurrence, token by token; decoding is the parallel pass; agreement with
transformers."""

import importlib.util
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.training.config.mixers.mamba2 import Mamba2
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import Role, initialize, role_of
from gristmill.training.model.ssm import mamba2
from gristmill.training.model.ssm.mamba2 import Scan, ScanInputs, backend_for, by_kernels, scan, ssd
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.tensor import TensorAxis
from tests.support.decoding import decoded

ROWS, HEADS, WIDTH, GROUPS, STATE = 2, 4, 3, 2, 5
OPTIONS = {"head_width": 8, "state": 4, "groups": 2, "chunk": 4}
HYBRID: dict[str, Any] = {
    "layers": 6,
    "width": 16,
    "heads": 2,
    "ffn_hidden_size": 24,
    "sequence_length": 16,
    "pattern": "M-M*-M",
    "positions": "none",
    "mlp": "relu2",
    "mixers": {"mamba2": OPTIONS},
}


def scan_inputs(tokens: int, documents: Tensor | None = None) -> ScanInputs:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    decay = -torch.rand(HEADS, generator=generator, dtype=torch.float64) * 4
    dt = torch.rand(ROWS, tokens, HEADS, generator=generator, dtype=torch.float64).requires_grad_()
    x, B, C = (draw(ROWS, tokens, *each) for each in ((HEADS, WIDTH), (GROUPS, STATE), (GROUPS, STATE)))
    return ScanInputs(x, dt, decay.requires_grad_(), B, C, documents)


def step_by_step(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The recurrence as the paper writes it: S = exp(dt A) S + dt x B^T, y = S C."""
    rows, tokens, heads, _ = inputs.x_BTHP.shape
    state, outputs = torch.zeros(rows, heads, WIDTH, STATE, dtype=torch.float64), []
    B, C = (each.repeat_interleave(heads // GROUPS, dim=2) for each in (inputs.B_BTGN, inputs.C_BTGN))
    for t in range(tokens):
        if inputs.documents_BT is not None and t:
            same = inputs.documents_BT[:, t] == inputs.documents_BT[:, t - 1]
            state = state * same[:, None, None, None]
        decay = torch.exp(inputs.dt_BTH[:, t] * inputs.A_H)[..., None, None]
        added = inputs.dt_BTH[:, t, :, None, None] * inputs.x_BTHP[:, t, :, :, None] * B[:, t, :, None]
        state = decay * state + added
        outputs.append((state * C[:, t, :, None]).sum(dim=-1))
    return torch.stack(outputs, dim=1), state


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "chunk"), [(12, 4), (12, 12), (13, 4), (7, 1), (1, 8)])
def test_the_chunked_scan_is_the_recurrence(tokens: int, chunk: int, packed: bool) -> None:
    documents = torch.tensor([[0] * tokens, [t // 3 for t in range(tokens)]]) if packed else None
    inputs = scan_inputs(tokens, documents)
    leaves = [inputs.x_BTHP, inputs.dt_BTH, inputs.A_H, inputs.B_BTGN, inputs.C_BTGN]
    found, expected = ssd(inputs, chunk), step_by_step(inputs)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12
    weights = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((found[0] * weights).sum() + found[1].sum(), leaves),
        torch.autograd.grad((expected[0] * weights).sum() + expected[1].sum(), leaves),
        strict=True,
    ):
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize(
    ("documents", "expected", "state"), [(None, [1, 5, 4.25, 12.25], 6.125), ([[0, 0, 1, 1]], [1, 5, 3, 11], 5.5)]
)
def test_the_example_of_the_docs(documents: Any, expected: list[float], state: float) -> None:
    """docs/mixers.md: a state that halves from token to token."""

    def column(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(1, 4, 1, 1)

    steps, decay = torch.ones(1, 4, 1, dtype=torch.float64), -torch.tensor([2.0], dtype=torch.float64).log()
    rows = None if documents is None else torch.tensor(documents)
    y, last = ssd(ScanInputs(column(1, 2, 3, 4), steps, decay, column(1, 1, 1, 1), column(1, 2, 1, 2), rows), 2)
    assert y.flatten().tolist() == pytest.approx(expected) and last.item() == pytest.approx(state)


def test_a_scan_goes_on_from_its_state() -> None:
    """Cut anywhere, also inside a document, the halves give the whole."""
    inputs = scan_inputs(10, torch.tensor([[0] * 10, [0] * 6 + [1] * 4]))
    whole, last = ssd(inputs, 4)
    for cut in (1, 6, 7):
        halves = [
            ScanInputs(*(part[:, span] if part.dim() > 1 else part for part in vars(inputs).values()))
            for span in (slice(0, cut), slice(cut, 10))
        ]
        first, state = ssd(halves[0], 4)
        # What the second half begins with belongs to the document of its first token.
        kept = (inputs.documents_BT[:, cut] == inputs.documents_BT[:, cut - 1]).double()
        second, end = ssd(halves[1], 4, state * kept[:, None, None, None])
        assert relative(torch.cat([first, second], dim=1), whole) < 1e-12 and relative(end, last) < 1e-12


def model_of(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig(**HYBRID | changes), 31, options=ComputeOptions(torch.float64))
    initialize(model, 3, torch.device("cpu"), torch.float64)
    with torch.no_grad():  # first values of 0.02 would hide the mixers behind the residual stream
        for name, parameter in model.named_parameters():
            if role_of(name, model.config).is_matrix_of_layer:
                parameter.mul_(10)
    return model


def test_packed_documents_are_those_documents_alone() -> None:
    model, tokens = model_of(), torch.randint(31, (1, 16), generator=torch.Generator().manual_seed(0))
    bounds = (0, 5, 6, 16)
    documents = torch.tensor([[0] * 5 + [1] + [2] * 10])
    packed = model(tokens, documents=documents)
    for first, end in pairwise(bounds):
        assert relative(packed[:, first:end], model(tokens[:, first:end])) < 1e-12


@torch.no_grad()
def test_token_by_token_is_the_parallel_pass() -> None:
    """With padding on the left of the second row; the state of a Mamba-2 layer does not grow."""
    model, tokens = model_of(), torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([0, 3])
    expected = [model(tokens[:1])[0], model(tokens[1:, 3:])[0]]
    outputs, sizes = [], []
    for logits, caches in decoded(model, tokens, padding, ((0, 5), *((t, t + 1) for t in range(5, 12)))):
        outputs.append(logits)
        sizes.append(caches[0].scan_BHPN.numel() + sum(part.numel() for part in caches[0].inputs))
    found = torch.cat(outputs, dim=1)
    assert relative(found[0], expected[0]) < 1e-12 and relative(found[1, 3:], expected[1]) < 1e-12
    assert set(sizes) == {sizes[0]}
    assert torch.equal(caches[0].take(torch.tensor([1])).scan_BHPN[0], caches[0].scan_BHPN[1])


def test_a_tree_of_tokens_is_rejected() -> None:
    model, positions = model_of(), torch.arange(3).unsqueeze(0)
    branches = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    with pytest.raises(ValueError, match="one chain of tokens a row"):
        model.masked_attention_metadata(positions, branches)


def test_first_values_and_decay_are_the_papers() -> None:
    """A in [1, 16), softplus(dt_bias) in [1e-3, 1e-1), D one; those and no matrix go without weight decay."""
    config = ModelConfig(**HYBRID | {"width": 512, "heads": 8, "sequence_length": 16})
    model = Transformer(config, 31)
    initialize(model, 0, torch.device("cpu"), torch.float32)
    values = dict(model.named_parameters())
    A, dt_bias = values["layers.0.mixer.scan.A_log"].exp(), values["layers.0.mixer.scan.dt_bias"]
    step = torch.nn.functional.softplus(dt_bias)
    assert 1 <= A.min() < 2 and 15 < A.max() < 16.001
    assert 0.00099 < step.min() < 0.002 and 0.05 < step.max() < 0.1001
    assert torch.equal(values["layers.0.mixer.scan.D"], torch.ones(128))
    taps = values["layers.0.mixer.x_convolution.weight"]
    assert 0.49 < taps.abs().max() <= 0.5
    here = "layers.0.mixer."
    roles = {name.removeprefix(here): role_of(name, config) for name in values if name.startswith(here)}
    kept = {name for name, role in roles.items() if role.decays}
    assert kept == {f"{name}.weight" for name in ("z", "x", "B", "C", "dt", "output")} | {
        f"{name}_convolution.weight" for name in "xBC"
    }
    assert roles["output.weight"] is Role.OUTPUT and roles["scan.A_log"] is Role.RECURRENCE


def test_flops_of_a_scan_by_hand() -> None:
    """8 tokens, width 4, expand 2 (inner 8), state 2, one group, chunk 4: C B^T 4 x 2, its product with x 4 x 8, states
    and their read 2 x 2 x 8: (8 + 32 + 32) x 8 tokens x 2. Weights: z and x 8 x 4, B and C 2 x 4, dt 2 x 4, output
    4 x 8, and 12 channels of 4 taps."""
    mixer = Mamba2(head_width=4, state=2, chunk=4)
    assert mixer.scan_flops(width=4, tokens=8) == 2 * 8 * (8 + 32 + 32)
    assert mixer.multiply_adds(4) == 2 * 32 + 2 * 8 + 8 + 32 + 12 * 4


# Where the scan's backend is chosen, what mamba_ssm's kernels are given, and that the plain scan can be compiled.


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


def test_the_kernels_read_streams_in_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """x, B and C stay bfloat16, steps are float32; against the plain scan, to the rounding of the result."""
    seen: list[torch.dtype] = []

    def kernels(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
        seen.extend(part.dtype for part in (x, dt, B, C))
        y, state = recurrence(*(part.float() for part in (x, dt, A, B, C)), **options)
        return y.to(x.dtype), state

    mixer = Mamba2(head_width=4, state=2, chunk=4)
    module = Scan(TensorAxis(single_process(), sequence_parallel=False), 2, mixer).to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter)
    generator = torch.Generator().manual_seed(1)
    streams = tuple(torch.randn(2, 9, width, generator=generator).bfloat16() for width in (8, 2, 2, 2))
    plain, _ = module(streams, None, None, False)
    monkeypatch.setattr(mamba2, "backend_for", lambda device, dtype: "mamba_ssm")
    monkeypatch.setitem(sys.modules, mamba2.KERNELS, SimpleNamespace(mamba_chunk_scan_combined=kernels))
    found, _ = module(streams, None, None, False)
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


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


@pytest.mark.parametrize("chunks", [5, 9, 30])
def test_two_levels_of_chunks_are_one(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """states_before in runs of chunks against one chunk after another, with gradients; 30 chunks make three levels."""
    generator = torch.Generator().manual_seed(chunks)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    inputs = drawn(2, chunks, 1, 3), drawn(2, chunks, 1, 3, 4, 5), drawn(2, 1, 3, 4, 5)
    outcomes = []
    for level in (64, 4):
        monkeypatch.setattr(mamba2, "ONE_LEVEL", level)
        before, state = mamba2.states_before(*inputs)
        assert before.shape == (2, chunks, 1, 3, 4, 5)
        outcomes.append((before, state, *torch.autograd.grad(before.square().sum() + state.sum(), inputs)))
    for first, second in zip(*outcomes, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_a_long_sequence_takes_few_steps() -> None:
    """1,024 chunks: 32 runs side by side, then from run to run."""
    kept, added = torch.ones(1, 1024, 1, 1), torch.ones(1, 1024, 1, 1, 1, 1)
    with torch.profiler.profile() as profile:
        before, state = mamba2.states_before(kept, added, torch.zeros(1, 1, 1, 1, 1))
    assert before.flatten().tolist() == list(range(1024)) and state.item() == 1024
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::mul") < 150
