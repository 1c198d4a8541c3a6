"""Mixture-of-experts layers: the router by hand, the layer against a dense loop over all experts, and laws."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from gristmill.foundation.errors import RecipeError
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layers import MoeConfig
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model.attention.metadata import RoutingMetadata
from gristmill.training.model.init import fill, initialize
from gristmill.training.model.modules import token_priorities
from gristmill.training.model.moe import mixture as experts_module
from gristmill.training.model.moe.dispatch import check_grouped_widths, gathered_sum, padded_positions, sum_of_rows
from gristmill.training.model.moe.mixture import MixtureOfExperts
from gristmill.training.model.moe.router import (
    Routing,
    capacity,
    choose_experts,
    count,
    gates_of,
    routers,
    within_capacity,
)
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.tensor import TensorAxis

WIDTH, SAMPLES, TOKENS = 12, 3, 10


def model_config(mlp: str = "swiglu", biases: bool = False, layers: int = 1, **moe: Any) -> ModelConfig:
    return ModelConfig(
        layers=layers,
        width=WIDTH,
        heads=2,
        ffn_hidden_size=20,
        sequence_length=TOKENS,
        mlp=mlp,
        biases=biases,
        moe={"experts": 4, "ffn_hidden_size": 7} | moe,
    )


def mixture_of(config: ModelConfig) -> MixtureOfExperts:
    mixture = MixtureOfExperts(config, 0, TensorAxis(single_process(), False), 1)
    generator = torch.Generator().manual_seed(3)
    fill(mixture, lambda _, parameter: torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return mixture


def tokens_like(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def plain_mlp(x: Tensor, gate: Any, up: Any, down: Any) -> Tensor:
    inner = F.linear(x, *up)
    hidden = F.gelu(inner, approximate="tanh") if gate is None else F.silu(F.linear(x, *gate)) * inner
    return F.linear(hidden, *down)


def part(linear: Any, index: int | None = None) -> Any:
    if linear is None:
        return None
    pick = (lambda value: value) if index is None else (lambda value: value[index])
    return pick(linear.weight), None if linear.bias is None else pick(linear.bias)


def dense_loop(mixture: MixtureOfExperts, config: ModelConfig, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by a gate that is zero where the router did not choose it."""
    router, moe = mixture.router, config.moe
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if moe.router == "softmax" else torch.sigmoid(logits)
    choice = scores.detach() + (0 if router.balance_bias is None else router.balance_bias)
    if moe.groups > 1:
        groups = choice.unflatten(-1, (moe.groups, -1))
        best = groups.sort(-1, descending=True).values[..., : router.top_k // moe.top_groups].sum(-1)
        worst_kept = best.sort(-1, descending=True).values[..., moe.top_groups - 1 : moe.top_groups]
        choice = groups.masked_fill((best < worst_kept).unsqueeze(-1), -1e9).flatten(-2)
    threshold = choice.sort(-1, descending=True).values[..., router.top_k - 1 : router.top_k]
    gates = scores * (choice >= threshold)
    if moe.normalize_gates:
        gates = gates / gates.sum(-1, keepdim=True)
    gates = gates * moe.gate_scale
    experts = mixture.experts
    every = [plain_mlp(x, *(part(linear, e) for linear in (experts.gate, experts.up, experts.down))) for e in range(4)]
    y = sum(gates[..., e : e + 1] * every[e] for e in range(4))
    for beside in (mixture.shared, mixture.residual):
        if beside is not None:
            alone = plain_mlp(x, part(getattr(beside, "gate", None)), part(beside.up), part(beside.down))
            if mixture.coefficient is None:
                y = y + alone
            else:
                share = F.linear(x, mixture.coefficient.weight, mixture.coefficient.bias).softmax(-1)
                y = y * share[..., 0:1] + alone * share[..., 1:]
    return y


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "olmoe": {"normalize_gates": False, "top_k": 3},
    "switch": {"normalize_gates": False, "top_k": 1},
    "deepseek": {
        "router": "sigmoid",
        "gate_scale": 2.5,
        "groups": 2,
        "top_groups": 1,
        "shared_experts": 2,
        "bias_update_rate": 0.1,
    },
    "pr_moe": {"top_k": 1, "residual": True, "normalize_gates": False},
    "gelu": {"mlp": "gelu", "biases": True, "residual": True},
    "all_experts": {"top_k": 4},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_mixture_is_a_dense_loop_over_its_experts(name: str) -> None:
    config = model_config(**MIXTURES[name])
    mixture = mixture_of(config)
    if mixture.router.balance_bias is not None:
        mixture.router.balance_bias += torch.tensor([0.3, -0.2, 0.1, 0.0])
    outcomes = []
    for compute in (lambda x: mixture(x), lambda x: dense_loop(mixture, config, x)):
        x = tokens_like().requires_grad_()
        mixture.zero_grad()
        y = compute(x)
        y.backward(tokens_like(2))
        gradients = {name: parameter.grad.clone() for name, parameter in mixture.named_parameters()}
        outcomes.append({"y": y.detach(), "x": x.grad} | gradients)
    ours, dense = outcomes
    assert ours.keys() == dense.keys()
    for quantity, value in dense.items():
        torch.testing.assert_close(ours[quantity], value, rtol=0, atol=1e-12 * value.abs().max().item(), msg=quantity)


def test_a_router_by_hand() -> None:
    """docs/mixture_of_experts.md works this example."""
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    plain = MoeConfig(experts=4)
    assert choose_experts(scores, None, 2, plain).tolist() == [[0, 1]]
    gates = gates_of(scores, torch.tensor([[0, 1]]), plain)
    torch.testing.assert_close(gates, torch.tensor([[0.625, 0.375]]))  # 0.5 / 0.8, 0.3 / 0.8
    # A bias changes the choice, not the gates: 0.3 - 0.2 = 0.1 is below 0.15.
    bias = torch.tensor([0.0, -0.2, 0.0, 0.0])
    assert choose_experts(scores, bias, 2, plain).tolist() == [[0, 2]]
    gates = gates_of(scores, torch.tensor([[0, 2]]), MoeConfig(experts=4, normalize_gates=False, gate_scale=2.0))
    torch.testing.assert_close(gates, torch.tensor([[1.0, 0.3]]))
    # Groups {0, 1} and {2, 3} score 0.8 and 0.2 with two experts of one group.
    limited = MoeConfig(experts=4, groups=2, top_groups=1)
    assert choose_experts(torch.tensor([[0.5, 0.1, 0.35, 0.3]]), None, 2, limited).tolist() == [[2, 3]]


def test_capacity_by_hand() -> None:
    assert [capacity(1.0, 1, 10, 4), capacity(1.25, 2, 8, 4), capacity(1.0, 1, 8, 4)] == [3, 5, 2]
    # Tokens 0 to 3 ask for experts 0, 0, 0, 1; each takes two, and token 0 has the lowest priority.
    experts = torch.tensor([[[0], [0], [0], [1]]])
    assert within_capacity(experts, 2, torch.tensor([[1, 5, 3, 2]])).flatten().tolist() == [False, True, True, True]


def test_dropped_tokens_have_no_result_and_are_drawn_by_sample() -> None:
    config = model_config(experts=2, top_k=1, capacity_factor=0.5, normalize_gates=False, drop="random")
    mixture, x = mixture_of(config), tokens_like()
    samples = torch.tensor([4, 7, 9])
    y = mixture(x, RoutingMetadata(samples, torch.ones(SAMPLES, TOKENS), 1.0, seed=5))
    counts = mixture.router.pass_counts
    limit = capacity(0.5, 1, TOKENS, 2)  # 3 of 10 tokens an expert
    chosen = (x @ mixture.router.weight.T).argmax(-1)
    priority = token_priorities(5, 0, samples, torch.arange(TOKENS))
    kept = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
    for sample in range(SAMPLES):
        for expert in range(2):
            asked = [token for token in range(TOKENS) if chosen[sample, token] == expert]
            asked.sort(key=lambda token: -priority[sample, token].item())
            kept[sample, asked[:limit]] = True
    whole = mixture(x)
    torch.testing.assert_close(y[kept], whole[kept])
    assert (y[~kept] == 0).all() and 0 < kept.sum() < kept.numel()
    assert counts.tolist() == [(chosen == 0).sum(), (chosen == 1).sum()]  # what was asked for, not what was taken


def test_permuted_experts_are_the_same_mixture() -> None:
    config = model_config(shared_experts=1)
    mixture, permuted = mixture_of(config), mixture_of(config)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for name, parameter in permuted.named_parameters():
            if not name.startswith("shared"):
                parameter.copy_(parameter[order].clone())
    torch.testing.assert_close(permuted(tokens_like()), mixture(tokens_like()), rtol=0, atol=1e-12)
    assert permuted.router.pass_counts.tolist() == mixture.router.pass_counts[order].tolist()


def test_experts_without_tokens_have_zero_gradients() -> None:
    mixture = mixture_of(model_config(top_k=1))
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[2] = 1.0
    x = tokens_like().abs()  # so that the scores of expert 2 are the highest for every token
    y, counts = mixture(x), mixture.router.pass_counts
    y.sum().backward()
    assert counts.tolist() == [0, 0, SAMPLES * TOKENS, 0]
    for linear in (mixture.experts.gate, mixture.experts.up, mixture.experts.down):
        sizes = linear.weight.grad.abs().sum(dim=(1, 2))
        assert [bool(size) for size in sizes] == [False, False, True, False]


def test_padded_runs_by_hand() -> None:
    position, ends, rows = padded_positions(torch.tensor([3, 0, 1]), 4)
    assert (position.tolist(), ends.tolist(), rows) == ([0, 1, 2, 8], [8, 8, 28], 28)


@pytest.mark.parametrize("moe", [{}, {"top_k": 1, "capacity_factor": 0.5}, {"mlp": "gelu", "biases": True}], ids=str)
def test_the_grouped_backend_is_the_loop(moe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped matmul also runs in float32 on a CPU, so its padding and masks are checked here."""
    mixture = mixture_of(model_config(**({"ffn_hidden_size": 8} | moe))).float()
    metadata = RoutingMetadata(torch.arange(SAMPLES), torch.ones(SAMPLES, TOKENS), 1.0, seed=5)
    outcomes = []
    for grouped in (False, True):
        monkeypatch.setattr(experts_module, "uses_grouped", lambda x, grouped=grouped: grouped)
        mixture.zero_grad()
        x = tokens_like().float().requires_grad_()
        y = mixture(x, metadata)
        y.backward(tokens_like(2).float())
        outcomes.append([y.detach(), x.grad, *(parameter.grad.clone() for parameter in mixture.parameters())])
    for loop, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, loop, rtol=1e-4, atol=1e-5)


def test_fsdp_sees_the_tensors_of_a_routing() -> None:
    """FSDP of torch 2.11 gathers a module's weights for the backward pass where it finds tensors in what came out."""
    tensors = [torch.zeros(1) for _ in range(3)]
    assert all(leaf is tensor for leaf, tensor in zip(tree_leaves(Routing(*tensors)), tensors, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_sum_of_a_gpu_is_that_of_the_cpu(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(7, 3, generator=generator), torch.rand(4, 2, generator=generator)
    row = torch.randint(0, 7, (4, 2), generator=generator)
    gates = weights if weighted else None
    torch.testing.assert_close(gathered_sum(rows, row, gates), sum_of_rows(rows, row, gates))


def losses_by_hand(mixture: MixtureOfExperts, config: ModelConfig, x: Tensor, weights: Tensor) -> Tensor:
    moe, (samples, tokens, _) = config.moe, x.shape
    logits = x @ mixture.router.weight.T
    z_loss = moe.router_z_loss * (weights * logits.logsumexp(-1) ** 2).sum()
    scores = logits.softmax(-1) if moe.router == "softmax" else torch.sigmoid(logits)
    shares = scores / scores.sum(-1, keepdim=True)
    chosen = scores.topk(2, dim=-1).indices
    total = z_loss
    for sample in range(samples):
        load = torch.bincount(chosen[sample].flatten(), minlength=4).double() * 4 / (2 * tokens)
        balance = (load * shares[sample].mean(dim=0)).sum()
        total = total + moe.balance_loss * weights[sample].sum() * balance
    return total


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_side_losses_enter_by_their_gradient(router: str) -> None:
    config = model_config(router=router, balance_loss=0.3, router_z_loss=0.2)
    mixture, x = mixture_of(config), tokens_like()
    weights = (torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    y = mixture(x, RoutingMetadata(torch.arange(SAMPLES), weights, 0.25, seed=5))
    y.sum().backward()
    injected = {name: parameter.grad.clone() for name, parameter in mixture.named_parameters()}
    mixture.zero_grad()
    (mixture(x).sum() + 0.25 * losses_by_hand(mixture, config, x, weights)).backward()
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(injected[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


def trained(moe: dict[str, Any], micro_batch: int, recompute: str) -> tuple[dict[str, Tensor], list[int]]:
    config = model_config(layers=2, **moe)
    model = Transformer(config, 31, layout=LayoutConfig(recompute=recompute), options=ComputeOptions(torch.float64, 1))
    initialize(model, 1, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 31, (4, TOKENS + 1), generator=generator)
    batch = {
        "tokens": drawn[:, :-1],
        "targets": drawn[:, 1:],
        "weights": torch.rand(4, TOKENS, generator=generator).double(),
        "samples": torch.arange(10, 14),
    }
    GradientAccumulation(model, micro_batch, causal_loss()).train(batch, [0.1])
    counts = [number for router in routers(model).values() for number in router.step_counts.tolist()]
    return {name: parameter.grad for name, parameter in model.named_parameters()}, counts


@pytest.mark.parametrize("moe", [{"balance_loss": 0.5, "router_z_loss": 0.1}, {"capacity_factor": 0.8}], ids=str)
def test_micro_batches_and_recomputation_change_no_gradient_and_no_count(moe: dict[str, Any]) -> None:
    gradients, counts = trained(moe, 4, "none")
    assert sum(counts) == 2 * 2 * 4 * TOKENS
    for micro_batch, recompute in ((1, "none"), (2, "full"), (4, "operators"), (4, "attention")):
        others, other_counts = trained(moe, micro_batch, recompute)
        assert other_counts == counts
        for name, value in gradients.items():
            torch.testing.assert_close(others[name], value, rtol=0, atol=1e-13, msg=name)


def test_the_bias_stays_float32_when_weights_are_cast() -> None:
    mixture = mixture_of(model_config(bias_update_rate=1e-3))
    mixture.router.balance_bias += 0.001
    mixture.to(torch.bfloat16)
    assert mixture.router.weight.dtype == torch.bfloat16
    assert torch.equal(mixture.router.balance_bias, torch.full((4,), 0.001))  # in bfloat16 it would be 0.00099945


def test_patterns_give_each_layer_its_experts() -> None:
    pyramid = model_config(layers=6, experts=(0, 4, 0, 4, 0, 8), top_k=1, ffn_hidden_size=(16, 16, 16, 16, 16, 32))
    assert [layer.experts for layer in pyramid.layer_list] == [0, 4, 0, 4, 0, 8]
    assert [layer.expert_ffn_hidden_size for layer in pyramid.layer_list] == [0, 16, 0, 16, 0, 32]
    model = Transformer(pyramid, 31)
    assert [layer.has_experts for layer in model.layers.values()] == [False, True] * 3
    assert model.layers["5"].mlp.experts.up.weight.shape == (8, 32, WIDTH)


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"top_k": 5}, "top_k=5 of 4 experts; set top_k between 1 and 4"),
        ({"experts": (4, 0, 4)}, "moe.experts has 3 entries, which do not repeat evenly over 2 layers"),
        ({"experts": 0}, "moe.experts is 0 in every layer"),
        ({"experts": ()}, "experts is an empty list"),
        ({"experts": -4}, "experts=-4"),
        ({"groups": 3, "top_groups": 1}, "4 experts do not split into groups=3"),
        ({"groups": 2, "top_groups": 3}, "top_groups=3 is above groups=2"),
        ({"groups": 4, "top_groups": 1}, "top_groups=1 groups hold 1 experts each"),
        ({"residual": True, "shared_experts": 1}, "both put an MLP beside the experts"),
    ],
)
def test_what_no_mixture_can_be_is_refused(moe: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        model_config(layers=2, **moe)
    assert says in str(error.value)


def test_counts_by_hand() -> None:
    assert count(torch.tensor([[0, 2], [2, 3]]), 5).tolist() == [1, 0, 2, 1, 0]


def test_widths_off_16_bytes_are_refused_on_gpus() -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    config, aligned = (model_config().model_copy(update={"width": 16}), model_config(ffn_hidden_size=8))
    refused = r"model.moe.ffn_hidden_size: the experts of layer 0 are 7 wide; .* set a multiple of 8"
    with pytest.raises(RecipeError, match=refused):
        check_grouped_widths(cuda, bf16, config, 1)
    with pytest.raises(RecipeError, match=r"model.width: the experts of layer 0 are 12 wide;"):
        check_grouped_widths(cuda, bf16, aligned, 1)
    aligned = aligned.model_copy(update={"width": 16})
    check_grouped_widths(cuda, bf16, aligned, 1)
    with pytest.raises(RecipeError, match=r"4 wide on each rank of layout.expert_tensor 2"):
        check_grouped_widths(cuda, bf16, aligned, 2)
    check_grouped_widths(cuda, torch.float32, config, 1)
    check_grouped_widths(torch.device("cpu"), bf16, config, 1)
