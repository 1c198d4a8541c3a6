"""TCNCA: the receptive field is the formula's, chunks are masked attention, decoding is the parallel pass."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.config.mixer import Share
from gristmill.training.config.mixers.tcnca import Tcnca
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.decoding_cache import RingBuffer
from gristmill.training.model.init import Role, initialize, role_of
from gristmill.training.model.ssm.convolution import CausalConvolution
from gristmill.training.model.ssm.tcnca import TcncaMixer
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.tensor import TensorAxis
from tests.support.decoding import decoded

OPTIONS = {"kernel": 3, "dilation": 2, "blocks": 2, "chunk": 4, "shared": 5}
SIZE: dict[str, Any] = {
    "layers": 3,
    "width": 8,
    "heads": 2,
    "ffn_hidden_size": 12,
    "sequence_length": 24,
    "positions": "none",
}
AXIS = TensorAxis(single_process(), sequence_parallel=False)


def model_of(pattern: str = "T-T", norm_order: str = "pre", **options: Any) -> Transformer:
    config = ModelConfig(
        **SIZE, pattern=pattern, mlp="gelu", norm_order=norm_order, mixers={"tcnca": OPTIONS | options}
    )
    model = Transformer(config, 31, options=ComputeOptions(torch.float64))
    initialize(model, 3, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # first values of 0.02 and 0 would hide the mixers behind the residual stream
        for name, parameter in model.named_parameters():
            if role_of(name, config).is_matrix_of_layer:
                parameter.mul_(20)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def mixer_of(**options: Any) -> TcncaMixer:
    return model_of(**options).layers["0"].mixer


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-6))


def test_the_receptive_field_of_the_docs() -> None:
    """docs/mixers.md: 1 + 2 (3 - 1) (1 + 2) = 13; the reference's 17 taps, growth 4, 3 blocks of 2: 673."""
    assert Tcnca(kernel=3, dilation=2, blocks=2, depth=2).receptive_field == 13
    assert Tcnca().receptive_field == 673 and Tcnca().dilations == (1, 1, 4, 4, 16, 16)


@pytest.mark.parametrize(
    ("kernel", "dilation", "blocks", "depth"), [(3, 2, 2, 2), (2, 3, 3, 1), (4, 1, 2, 1), (1, 2, 2, 2), (5, 4, 2, 1)]
)
def test_the_convolutions_see_exactly_the_receptive_field(kernel: int, dilation: int, blocks: int, depth: int) -> None:
    mixer = mixer_of(kernel=kernel, dilation=dilation, blocks=blocks, depth=depth)
    field = mixer.mixer.receptive_field
    x = draw(1, field + 7, 8).requires_grad_()
    last, _ = mixer._convolve(x, None, None, keep=False)
    last[0, -3].sum().backward()
    seen = x.grad[0].abs().sum(dim=1) > 0
    places = seen.nonzero().flatten().tolist()
    assert places[0] == len(seen) - 3 - (field - 1) and places[-1] == len(seen) - 3
    if dilation <= kernel:  # else tokens between the taps of the last block are skipped
        assert places == list(range(places[0], places[-1] + 1))


@pytest.mark.parametrize(("tokens", "dilation"), [(13, 1), (13, 3), (8, 4), (3, 4)])
def test_the_convolution_is_torchs(tokens: int, dilation: int) -> None:
    convolution = CausalConvolution(AXIS, 6, 4, dilation).to_empty(device="cpu").double()
    with torch.no_grad():
        convolution.weight.copy_(draw(6, 4))
        convolution.bias.copy_(draw(6, seed=1))
    x = draw(2, tokens, 6, seed=2).requires_grad_()
    found = convolution(x, None, None)
    padded = F.pad(x.transpose(1, 2), (3 * dilation, 0))
    weight = convolution.weight.unsqueeze(1)
    expected = F.conv1d(padded, weight, convolution.bias, dilation=dilation, groups=6).transpose(1, 2)
    assert relative(found, expected) < 1e-14
    factor, leaves = draw(2, tokens, 6, seed=3), [x, convolution.weight, convolution.bias]
    for one, other in zip(
        torch.autograd.grad((found * factor).sum(), leaves),
        torch.autograd.grad((expected * factor).sum(), leaves),
        strict=True,
    ):
        assert relative(one, other) < 1e-14
    documents = torch.zeros(2, tokens, dtype=torch.int64)
    assert relative(convolution(x, documents, None), expected) < 1e-14


def written_out(mixer: TcncaMixer, x_TD: Tensor) -> Tensor:
    """The paper's equations, token by token and head by head, for one document."""
    tokens, options = len(x_TD), mixer.mixer
    mixed = x_TD
    for block in range(options.blocks):
        change = mixed
        for index in range(block * options.depth, (block + 1) * options.depth):
            taps, step = mixer.convolutions[index].weight, options.dilation**block
            rows = []
            for t in range(tokens):
                row = mixer.convolutions[index].bias
                for back in range(options.kernel):
                    if t >= back * step:
                        row = row + taps[:, options.kernel - 1 - back] * change[t - back * step]
                rows.append(row)
            change = F.silu(torch.stack(rows))
        mixed = mixed + change
    z = F.silu(mixed @ mixer.shared.weight.T + mixer.shared.bias)
    query, key = (z * mixer.query_key.weight[i] + mixer.query_key.bias[i] for i in (0, 1))
    value = (x_TD if options.gated else mixed) @ mixer.value.weight.T + mixer.value.bias
    value = F.silu(value) if options.gated else value
    scores = query @ key.T / options.shared**0.5
    for t in range(tokens):
        for s in range(tokens):
            if s > t or s // options.chunk != t // options.chunk:
                scores[t, s] = -torch.inf
            else:
                scores[t, s] += mixer.distances.bias[t - s]
    read = scores.softmax(dim=-1) @ value
    if not options.gated:
        return read @ mixer.output.weight.T
    reset = F.silu(mixed @ mixer.reset.weight.T + mixer.reset.bias)
    update = torch.sigmoid(mixed @ mixer.update.weight.T + mixer.update.bias)
    candidate = mixed @ mixer.candidate.weight.T + (reset * read) @ mixer.output.weight.T + mixer.candidate.bias
    return update * F.silu(candidate) + (1 - update) * x_TD - x_TD


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [12, 10, 3])
@torch.no_grad()
def test_the_mixer_is_the_equations(tokens: int, gated: bool) -> None:
    model = model_of(gated=gated)
    mixer, x = model.layers["0"].mixer, draw(1, tokens, 8)
    metadata = model.attention_metadata(x)
    assert relative(mixer(x, metadata)[0][0], written_out(mixer, x[0])) < 1e-12


def test_under_post_norm_the_layer_is_megas() -> None:
    """norm(u h + (1 - u) x)."""
    model, x = model_of(pattern="TTT", norm_order="post"), draw(1, 12, 8)
    layer = model.layers["0"]
    expected = layer.mixer_norm(x + written_out(layer.mixer, x[0]))
    assert relative(layer(x, model.attention_metadata(x))[0], expected) < 1e-12


@pytest.mark.parametrize("documents", [False, True])
def test_no_token_reads_a_later_one(documents: bool) -> None:
    model, x = model_of(), draw(1, 12, 8).requires_grad_()
    packed = torch.tensor([[0] * 5 + [1] * 7]) if documents else None
    y, _ = model.layers["0"].mixer(x, model.attention_metadata(x, documents=packed))
    y[0, 6].sum().backward()
    used = x.grad[0].abs().sum(dim=1) > 0
    assert used[6] and not used[7:].any()
    assert used[:5].any() != documents


@pytest.mark.parametrize("gated", [True, False])
def test_packed_documents_are_those_documents_alone(gated: bool) -> None:
    model, tokens = model_of(gated=gated), torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(0))
    bounds = ((0, 5, 6, 24), (0, 12, 24))
    rows = [[number for number, (a, b) in enumerate(pairwise(each)) for _ in range(a, b)] for each in bounds]
    packed = model(tokens, documents=torch.tensor(rows))
    for row, each in enumerate(bounds):
        for first, end in pairwise(each):
            alone = model(tokens[row : row + 1, first:end])
            assert relative(packed[row : row + 1, first:end], alone) < 1e-12


@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_token_by_token_is_the_parallel_pass(gated: bool) -> None:
    """Of a hybrid with attention; with padding on the left of the second row, and pieces of several tokens, of which
    one ends inside a chunk. The state of a layer does not grow."""
    model = model_of(pattern="T*T", gated=gated)
    tokens, padding = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3])
    expected = [model(tokens[:1])[0], model(tokens[1:, 3:])[0]]
    outputs, sizes = [], []
    for logits, caches in decoded(
        model, tokens, padding, ((0, 5), (5, 6), (6, 9), *((t, t + 1) for t in range(9, 17)))
    ):
        outputs.append(logits)
        buffers = (*caches[0].inputs, caches[0].keys, caches[0].values)
        sizes.append(sum(buffer.memory.slots_BLC.numel() for buffer in buffers))
    found = torch.cat(outputs, dim=1)
    assert relative(found[0], expected[0]) < 1e-12 and relative(found[1, 3:], expected[1]) < 1e-12
    assert set(sizes) == {2 * (12 * 8 + 4 * (5 + 16))}  # rows x (12 inputs of 8 channels, keys and values of a chunk)


def test_a_ring_buffer_keeps_the_last_columns() -> None:
    columns = draw(2, 7, 3)
    buffer = RingBuffer.of(columns[:, :4])
    for t in range(4, 7):
        before = buffer
        buffer = buffer.append(columns[:, t])
        assert torch.equal(buffer.in_order(), columns[:, t - 3 : t + 1])
        assert torch.equal(buffer.at([1, 4]), columns[:, [t, t - 3]])
        slots, back = buffer.slots()
        assert torch.equal(slots, columns[:, t + 1 - back])
    with pytest.raises(RuntimeError, match="continued already"):
        before.in_order()
    copy = buffer.take(torch.tensor([1]))
    buffer.append(columns[:, 0])
    assert torch.equal(copy.in_order(), columns[1:, 3:7])


def test_roles_and_first_values() -> None:
    model = Transformer(ModelConfig(**SIZE, mixer="tcnca", mixers={"tcnca": OPTIONS}), 31)
    initialize(model, 0, torch.device("cpu"), torch.float32)
    here = "layers.0.mixer."
    values = {name.removeprefix(here): value for name, value in model.named_parameters() if name.startswith(here)}
    roles = {name: role_of(here + name, model.config) for name in values}
    matrices = {f"{name}.weight" for name in ("shared", "value", "reset", "candidate", "update", "output")}
    filters = {f"convolutions.{index}.weight" for index in range(4)}
    assert {name for name, role in roles.items() if role.decays} == matrices | filters
    assert {name for name, role in roles.items() if role.is_matrix_of_layer} == matrices
    assert roles["output.weight"] is Role.OUTPUT
    assert torch.equal(values["query_key.weight"], torch.ones(2, 5)) and not values["distances.bias"].any()
    assert values["convolutions.0.weight"].abs().max() <= 3**-0.5


def test_flops_and_state_by_hand() -> None:
    """Width 8, queries and keys 5 wide, values 16: 24 tokens x 4 keys x (5 + 16) multiply-adds; state of 2 rows: 12
    inputs of 8 channels, 4 keys and values, in 4 bytes, and the position."""
    mixer = Tcnca(**OPTIONS)
    assert mixer.scan_flops(8, 24) == 2 * 24 * 4 * (5 + 16)
    assert mixer.state_bytes(8, Share(rows=2, tokens=24, compute=4)) == 2 * (4 * (12 * 8 + 4 * 21) + 8)
    projections = 8 * 5 + 8 * 16 + 8 * 16 + 2 * 8 * 8 + 16 * 8
    assert mixer.multiply_adds(8) == projections + 4 * 8 * 3
