"""One mixture over expert ranks against the same mixture in one process, with loads from even to all on one expert."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import fill, shard_like
from gristmill.training.model.moe.dispatch import inverse
from gristmill.training.model.moe.mixture import MixtureOfExperts
from gristmill.training.parallel.mesh import Mesh, build_mesh, single_process
from gristmill.training.parallel.tensor import TensorAxis

WIDTH, SAMPLES, TOKENS, EXPERTS = 6, 4, 5, 4
CONFIG = ModelConfig(
    layers=1,
    width=WIDTH,
    heads=1,
    sequence_length=TOKENS,
    mlp="gelu",
    biases=True,
    moe={"experts": EXPERTS, "top_k": 1, "ffn_hidden_size": 8, "normalize_gates": False},
)
# load: which expert each sample's tokens go to; None leaves it to the drawn router
LOADS: dict[str, list[int] | None] = {
    "as drawn": None,
    "all on one expert": [2, 2, 2, 2],
    "each rank on one": [3, 3, 0, 0],
    "only the last rank's experts": [2, 3, 2, 3],
}


def values(load: list[int] | None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(weights by name, tokens, gradient of the result)."""
    generator = torch.Generator().manual_seed(0)
    mixture = MixtureOfExperts(CONFIG, 0, TensorAxis(single_process(), False), 1)
    weights = {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in mixture.named_parameters()
    }
    x, upstream = (torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    if load is not None:  # expert e looks at feature e only, which says where the sample goes
        weights["router.weight"] = torch.eye(EXPERTS, WIDTH, dtype=torch.float64)
        x[..., :EXPERTS] *= 0.1
        for sample, expert in enumerate(load):
            x[sample, :, expert] += 5.0
    return weights, x, upstream


def computed(mesh: Mesh, expert_tensor: int, load: list[int] | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(the result of this data rank's samples, the gradients, whole)."""
    weights, x, upstream = values(load)
    mixture = MixtureOfExperts(CONFIG, 0, TensorAxis(mesh, False), expert_tensor)
    fill(mixture, lambda name, parameter: shard_like(weights[name], parameter))
    x, upstream = (each.chunk(mesh.data.size)[mesh.data.rank] for each in (x, upstream))
    y = mixture(x)
    y.backward(upstream)
    gradients = {name: parameter.grad for name, parameter in mixture.named_parameters() if "experts" in name}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in gradients.items()}
    return y.detach().numpy(), {name: value.numpy() for name, value in whole.items()}


def on_this_rank(layout: LayoutConfig, load: list[int] | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return computed(build_mesh(layout, 1, torch.device("cpu"), experts=True), layout.expert_tensor, load)


@pytest.mark.parametrize("axes", [{"expert": 2}, {"expert": 4}, {"expert": 2, "expert_tensor": 2}], ids=str)
@pytest.mark.parametrize("name", LOADS)
def test_any_load_gives_the_result_of_one_process(name: str, axes: dict[str, int], pool: Any) -> None:
    expected, expected_gradients = computed(single_process(), 1, LOADS[name])
    size = axes["expert"] * axes.get("expert_tensor", 1)
    ranks = pool.run(size, on_this_rank, LayoutConfig(data=size, **axes), LOADS[name])
    np.testing.assert_allclose(np.concatenate([y for y, _ in ranks]), expected, rtol=0, atol=1e-12)
    for _, gradients in ranks:
        assert gradients.keys() == expected_gradients.keys()
        for parameter, value in expected_gradients.items():
            np.testing.assert_allclose(gradients[parameter], value, rtol=0, atol=1e-12, err_msg=parameter)


def test_an_inverse_by_hand() -> None:
    assert inverse(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]
