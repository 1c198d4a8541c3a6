"""One product for several layers equals a product each: outputs and gradients, whatever lies where in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

from gristmill.foundation.errors import RecipeError
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model.moe.dispatch import Runs, grouped_linear
from gristmill.training.parallel.linear import (
    check_float8,
    float8_linear,
    float8_rows,
    joins,
    joint_linear,
    linear,
    matmul,
    place_jointly,
)
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.layout_checks import validation_errors

SIZES = (12, 4, 4)


def drawn(dtype: torch.dtype, bias: bool) -> tuple[Tensor, list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    weights = [nn.Parameter(torch.randn(size, 8, generator=generator, dtype=torch.float64).to(dtype)) for size in SIZES]
    biases = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)) for size in SIZES]
    return x, weights, biases if bias else []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_a_joint_product_is_a_product_each(dtype: torch.dtype, tolerance: float, adjacent: bool, bias: bool) -> None:
    x, weights, biases = drawn(dtype, bias)
    if adjacent:
        place_jointly(weights)
        assert weights[0].data_ptr() + weights[0].nbytes == weights[1].data_ptr()
    leaf = x.to(dtype).requires_grad_()
    outputs = joint_linear(leaf, weights, biases)
    factors = [torch.cos(output.detach()) for output in outputs]  # any gradient that differs from number to number
    sum((output * factor).sum() for output, factor in zip(outputs, factors, strict=True)).backward()
    leaves = [part.detach().double().requires_grad_() for part in (leaf, *weights, *biases)]
    expected = [F.linear(leaves[0], leaves[1 + i], leaves[4 + i] if bias else None) for i in range(len(SIZES))]
    sum((output * factor).sum() for output, factor in zip(expected, factors, strict=True)).backward()
    for own, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=0, atol=tolerance)
    for own, other in zip([leaf, *weights, *biases], leaves, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 200])
def test_weights_that_lie_by_inputs_are_read_in_place(tokens: int) -> None:
    """200 tokens by 2 x 400 x 64 are a product for oneDNN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator)
    weights = [nn.Parameter(torch.randn(400, 64, generator=generator), requires_grad=False) for _ in range(2)]
    expected = [F.linear(x.double(), weight.double()) for weight in weights]
    place_jointly(weights, by_input=True)
    assert joins(x, weights) and all(weight.stride() == (1, 800) for weight in weights)
    for output, other in zip(joint_linear(x, weights), expected, strict=True):
        torch.testing.assert_close(output.double(), other, rtol=0, atol=1e-4)


def test_gradients_that_lie_beside_each_other_are_taken_as_one() -> None:
    x, weights, _ = drawn(torch.float64, False)
    outputs = joint_linear(x.requires_grad_(), weights)
    joint = torch.randn(2, 5, sum(SIZES), dtype=torch.float64)
    beside = torch.autograd.grad(outputs, [x, *weights], joint.split(SIZES, dim=-1), retain_graph=True)
    apart = torch.autograd.grad(outputs, [x, *weights], [part.clone() for part in joint.split(SIZES, dim=-1)])
    for one, other in zip(beside, apart, strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_is_cast_has_its_gradient_in_its_own_precision() -> None:
    x, weights, _ = drawn(torch.float32, False)
    outputs = joint_linear(x.bfloat16().requires_grad_(), weights)
    assert all(output.dtype == torch.bfloat16 for output in outputs)
    torch.cat(outputs, dim=-1).sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in weights)


def test_float32_of_one_layer_is_torchs() -> None:
    x, (weight, *_), _ = drawn(torch.float32, False)
    x = x.float()
    with torch.no_grad():
        expected = linear(x, weight, None)
        assert torch.equal(expected, F.linear(x, weight))
    torch.testing.assert_close(linear(x, weight, None), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_has_three_products_for_each_joint_layer(precision: str) -> None:
    """Forward, and by input and by weight: of query, key and value together, output, up and down; of the head, one."""
    model = ModelConfig(layers=2, width=32, heads=4, sequence_length=16, mlp="gelu")
    train = TrainConfig(tokens=1, batch_tokens=1, precision=precision)
    parts = build_local_model(model, 50, train, single_process(), seed=1)
    part = parts.stages[0]
    part.output = causal_loss()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with profile() as profiled:
        part(tokens, tokens=tokens, targets=tokens, weights=torch.ones(2, 16))[:, 0].sum().backward()
    calls = {each.key: each.count for each in profiled.key_averages()}
    products = sum(calls.get(name, 0) for name in ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"))
    assert products == 3 * (2 * 4 + 1)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(3, 5, 7), (0, 64, 64), (64, 0, 64), (200, 96, 160), (192, 2048, 65)],
    ids=["small", "no rows", "no depth", "large", "deep"],
)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_matmul_is_the_product_of_any_views(
    rows: int, depth: int, columns: int, layout: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, depth, generator=generator)
    right = torch.randn(depth, columns, generator=generator)
    if layout == "expanded":
        left = torch.randn(rows, 1, generator=generator).expand(rows, depth)
    left, right = left.to(dtype), right.to(dtype)
    if layout == "transposed":
        left, right = left.T.contiguous().T, right.T.contiguous().T
    if layout == "sliced":
        left, right = F.pad(left, (3, 4))[:, 3:-4], F.pad(right, (1, 2))[:, 1:-2]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-15}[dtype]
    expected = left.double() @ right.double()
    torch.testing.assert_close(matmul(left, right).double(), expected, rtol=0, atol=tolerance * max(depth, 1))


# The float8 linear layer equals the exact product within float8 precision, forward and backward.


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def test_products_and_gradients_are_right_to_eight_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((2, 16, 64), (32, 64), (2, 16, 32)))
    x8, weight8 = (value.bfloat16().requires_grad_() for value in (x, weight))
    y = float8_linear(x8, weight8)
    y.backward(gradient.bfloat16())
    assert relative_error(y.detach(), x @ weight.T) < 0.05  # e4m3 has 3 bits after the point: 2^-4 at most an element
    assert relative_error(x8.grad, gradient @ weight) < 0.1  # e5m2 has 2
    assert relative_error(weight8.grad, torch.einsum("btf,btd->fd", gradient, x)) < 0.1


def test_sizes_that_do_not_fit_are_named() -> None:
    model = ModelConfig(layers=2, width=64, heads=4, ffn_hidden_size=72, sequence_length=24)
    train = TrainConfig(tokens=48, batch_tokens=24, float8=True, layout={"tensor": 2})
    assert list(validation_errors(model, train, 64, 2)) == [
        "float8 wants tokens of a micro-batch on a rank (24) to be a multiple of 16; change it, or set float8: false",
        "float8 wants hidden width on a tensor rank (36) to be a multiple of 16; change it, or set float8: false",
    ]
    with pytest.raises(ValueError, match="float8 products come out in bf16, not fp32; set precision: bf16"):
        TrainConfig(tokens=48, batch_tokens=24, float8=True, precision="fp32")


def test_devices_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products, of experts, run on fewer GPUs."""
    with pytest.raises(RecipeError, match=r"needs a GPU with 8-bit matmuls .*, not cpu; set it false"):
        check_float8(torch.device("cpu"))
    for capability, takes_experts in (((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        check_float8(torch.device("cuda"))
        if takes_experts:
            check_float8(torch.device("cuda"), experts=True)
            continue
        with pytest.raises(RecipeError, match="experts need a GPU with grouped 8-bit matmuls"):
            check_float8(torch.device("cuda"), experts=True)


def test_rows_in_eight_bits_by_hand() -> None:
    """The largest of a row becomes 448; 1/3 of it, 149.33, lies between 144 and 160."""
    values, scale = float8_rows(torch.tensor([[3.0, -1.0, 0.0], [0.5, 0.25, -0.5], [0.0, 0.0, 0.0]]))
    assert values.float().tolist() == [[448, -144, 0], [448, 224, -448], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([3 / 448, 0.5 / 448, 1e-12])


def test_grouped_products_are_right_to_eight_bits() -> None:
    """Runs of 8, 0 and 24 rows. Gradients of weights are those of 16 bits."""
    generator = torch.Generator().manual_seed(0)
    shapes = (32, 64), (3, 16, 64), (32, 16)
    x, weight, upstream = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    ends = torch.tensor([8, 8, 32], dtype=torch.int32)

    def results(float8: bool) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = grouped_linear(*own, Runs(ends_E=ends), float8)
        y.backward(upstream)
        return [y.detach(), *(one.grad for one in own)]

    (y8, x8, weight8), (y, x_gradient, weight_gradient) = results(True), results(False)
    assert relative_error(y8, y.float()) < 0.04 and relative_error(x8, x_gradient.float()) < 0.04
    assert weight8.equal(weight_gradient) and (weight8[1] == 0).all()
    (values, scale), (weight_values, weight_scale) = float8_rows(x), float8_rows(weight)
    row, output = 11, 5  # of the third expert
    product = (values[row].double() * weight_values[2, output].double()).sum() * scale[row] * weight_scale[2, output]
    assert y8[row, output].item() == pytest.approx(product.item(), rel=2**-8)
