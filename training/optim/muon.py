"""Muon (Keller Jordan, 2024): momentum, orthogonalized before it is applied. For the matrices of layers;
AdamW updates all other parameters."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gristmill.training.model.roles import role_of
from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.adamw import AdamW, Operands, operands_of
from gristmill.training.optimizer_config import OptimizerConfig
from gristmill.training.parallel.local import local, local_shard, stored_like

# Newton-Schulz quintic a x + b x^3 + c x^5 whose fixed slope at 0 is steep: singular values reach 0.7 to 1.2 in 5
# rounds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon:
    """A matrix is gathered to be made orthogonal; each process then updates its own shard."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        model: ModelConfig,
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    ):
        self.parameters, self.config = parameters, config
        self.matrices = {name: value for name, value in parameters.items() if role_of(name, model).is_matrix_of_layer}
        rest = {name: value for name, value in parameters.items() if name not in self.matrices}
        self.adamw = AdamW(rest, config, model, zeros_like)
        self.momentum = {name: zeros_like(local(value.detach())) for name, value in self.matrices.items()}

    @property
    def updates(self) -> int:
        return self.adamw.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.adamw.updates = value

    def tensors_of(self, name: str) -> tuple[Tensor, ...]:
        """The state of a parameter's shard."""
        return (self.momentum[name],) if name in self.matrices else self.adamw.tensors_of(name)

    def is_whole(self, name: str) -> bool:
        """Whether an update needs the whole parameter."""
        return name in self.matrices

    def step(self, rate_share: float) -> None:
        self.update([operands_of(self, name, value) for name, value in self.parameters.items()], rate_share)
        self.updates += 1

    @torch.no_grad()
    def update(self, operands: Sequence[Operands], rate_share: float) -> None:
        """Updates these with the state they carry. A matrix is made orthogonal on its parameter's device, which holds
        the processes' links, wherever the rest is computed."""
        rate, decay = self.config.muon_learning_rate * rate_share, self.config.weight_decay
        for each in operands:
            if each.name in self.matrices:
                each.parameter.mul_(1 - rate * decay).sub_(self._direction(each), alpha=rate)
        self.adamw.update([each for each in operands if each.name not in self.matrices], rate_share)

    def state(self) -> dict[str, Tensor]:
        own = {f"{name}.momentum": stored_like(self.momentum[name], value) for name, value in self.matrices.items()}
        return own | self.adamw.state()

    def _direction(self, operands: Operands) -> Tensor:
        """This process's shard of the orthogonal update with Nesterov momentum, times sqrt(max(1, rows / columns))."""
        parameter, gradient, (momentum,) = self.matrices[operands.name], operands.gradient, operands.state
        momentum.mul_(self.config.muon_momentum).add_(gradient)
        ahead = gradient.add(momentum, alpha=self.config.muon_momentum)
        ahead = stored_like(ahead.to(local(parameter.detach()).device), parameter)
        whole = ahead.full_tensor() if hasattr(ahead, "full_tensor") else ahead
        rows, columns = whole.shape[-2:]
        direction = local_shard(orthogonal(whole), parameter) * max(1.0, rows / columns) ** 0.5
        return direction.to(gradient.device)


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
