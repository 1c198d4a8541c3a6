"""Muon (Keller Jordan, 2024): momentum, orthogonalized before it is applied. For the matrices of layers;
AdamW updates all other parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gristmill.training.model.roles import role_of
from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.local import local, local_shard, stored_like
from gristmill.training.optimizer_config import OptimizerConfig

# Newton-Schulz quintic a x + b x^3 + c x^5 whose fixed slope at 0 is steep: singular values reach 0.7 to 1.2 in 5
# rounds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon:
    """A matrix is gathered to be made orthogonal; each process then updates its own shard."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig):
        self.config = config
        self.matrices = {name: value for name, value in parameters.items() if role_of(name, model).is_matrix_of_layer}
        rest = {name: value for name, value in parameters.items() if name not in self.matrices}
        self.adamw = AdamW(rest, config, model)
        self.momentum = {name: torch.zeros_like(local(value.detach())) for name, value in self.matrices.items()}

    @property
    def updates(self) -> int:
        return self.adamw.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.adamw.updates = value

    @torch.no_grad()
    def step(self, rate_share: float) -> None:
        rate, decay = self.config.muon_learning_rate * rate_share, self.config.weight_decay
        for name, parameter in self.matrices.items():
            shard = local(parameter.detach())
            shard.mul_(1 - rate * decay).sub_(self._direction(name, parameter), alpha=rate)
        self.adamw.step(rate_share)

    def state(self) -> dict[str, Tensor]:
        own = {f"{name}.momentum": stored_like(self.momentum[name], value) for name, value in self.matrices.items()}
        return own | self.adamw.state()

    def _direction(self, name: str, parameter: nn.Parameter) -> Tensor:
        """This process's shard of the orthogonal update with Nesterov momentum, times sqrt(max(1, rows / columns))."""
        gradient, momentum = local(parameter.grad), self.momentum[name]
        momentum.mul_(self.config.muon_momentum).add_(gradient)
        ahead = stored_like(gradient.add(momentum, alpha=self.config.muon_momentum), parameter)
        whole = ahead.full_tensor() if hasattr(ahead, "full_tensor") else ahead
        rows, columns = whole.shape[-2:]
        return local_shard(orthogonal(whole), parameter) * max(1.0, rows / columns) ** 0.5


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of the matrix: singular values near 1, singular vectors kept. Of several matrices
    [experts, rows, columns], that of each."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
