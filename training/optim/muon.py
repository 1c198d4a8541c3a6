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
BATCH_ELEMENTS = 2**28  # of matrices whose products run together on a GPU: 512 MB of bfloat16


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
        matrices = [each for each in operands if each.name in self.matrices]
        devices = {self.matrices[each.name].device.type for each in matrices}
        for batch in of_one_shape(matrices, self.matrices, BATCH_ELEMENTS if devices == {"cuda"} else 0):
            for each, direction in zip(batch, self._directions(batch), strict=True):
                each.parameter.mul_(1 - rate * decay).sub_(direction, alpha=rate)
        self.adamw.update([each for each in operands if each.name not in self.matrices], rate_share)

    def state(self) -> dict[str, Tensor]:
        own = {f"{name}.momentum": stored_like(self.momentum[name], value) for name, value in self.matrices.items()}
        return own | self.adamw.state()

    def _directions(self, batch: Sequence[Operands]) -> list[Tensor]:
        """This process's shards of the orthogonal updates with Nesterov momentum, times sqrt(max(1, rows / columns)).
        On GPUs matrices of one shape are one batch of products, in bfloat16 as in Keller Jordan's own code."""
        wholes = [self._ahead(each) for each in batch]
        stacked = wholes[0].unsqueeze(0) if len(wholes) == 1 else torch.stack(wholes)
        if stacked.is_cuda and stacked.dtype == torch.float32:
            stacked = stacked.to(torch.bfloat16)
        made = [orthogonal(stacked[0])] if len(wholes) == 1 else orthogonal(stacked).unbind()
        rows, columns = wholes[0].shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5
        return [
            (local_shard(one, self.matrices[each.name]).to(each.gradient.dtype) * factor).to(each.gradient.device)
            for each, one in zip(batch, made, strict=True)
        ]

    def _ahead(self, operands: Operands) -> Tensor:
        """The gradient with Nesterov momentum, whole."""
        parameter, gradient, (momentum,) = self.matrices[operands.name], operands.gradient, operands.state
        momentum.mul_(self.config.muon_momentum).add_(gradient)
        ahead = gradient.add(momentum, alpha=self.config.muon_momentum)
        ahead = stored_like(ahead.to(local(parameter.detach()).device), parameter)
        return ahead.full_tensor() if hasattr(ahead, "full_tensor") else ahead


def of_one_shape(
    operands: Sequence[Operands], parameters: Mapping[str, Tensor], max_elements: int
) -> list[list[Operands]]:
    """Batches of matrices of one shape, of at most so many elements together (or one matrix). Of 2 x 3, 4 x 4, 2 x
    3 and 2 x 3 in batches of 12: the first with the third, the fourth, the second."""
    batches: list[list[Operands]] = []
    by_shape: dict[torch.Size, list[Operands]] = {}
    for each in operands:
        by_shape.setdefault(parameters[each.name].shape, []).append(each)
    for shape, same in by_shape.items():
        size = max(1, max_elements // shape.numel())
        batches += [same[start : start + size] for start in range(0, len(same), size)]
    return batches


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
