"""AdamW (arXiv 1711.05101), fused, on the local shards of the parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gristmill.training.model.roles import rate_factor, role_of
from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.local import local, stored_like
from gristmill.training.optimizer_config import OptimizerConfig


class AdamW:
    """Keeps two moments a parameter, by the parameter's name; so its state moves between layouts as parameters do."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig):
        self.parameters, self.config = parameters, config
        self.updates = 0
        self.first = {name: torch.zeros_like(local(parameter.detach())) for name, parameter in parameters.items()}
        self.second = {name: torch.zeros_like(local(parameter.detach())) for name, parameter in parameters.items()}
        self._groups = _groups(parameters, config, model)

    @torch.no_grad()
    def step(self, rate_share: float) -> None:
        """One update with the current gradients; rate_share is the schedule's share of the learning rate."""
        for (decay, factor), names in self._groups.items():
            names = [name for name in names if self.first[name].numel()]
            if not names:
                continue
            device = self.first[names[0]].device
            # One tensor cut up: a number each would be a copy to the GPU each.
            steps = torch.full((len(names),), float(self.updates), device=device)
            adamw(
                [local(self.parameters[name].detach()) for name in names],
                [local(self.parameters[name].grad) for name in names],
                [self.first[name] for name in names],
                [self.second[name] for name in names],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=self.config.learning_rate * rate_share * factor,
                weight_decay=decay,
                eps=self.config.epsilon,
            )
        self.updates += 1

    def state(self) -> dict[str, Tensor]:
        """The moments under flat names, sharing memory: saved from here and loaded into here."""
        return {
            f"{name}.{label}": stored_like(moments[name], self.parameters[name])
            for label, moments in (("first_moment", self.first), ("second_moment", self.second))
            for name in self.parameters
        }


def _groups(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, model: ModelConfig
) -> dict[tuple[float, float], list[str]]:
    """Names by (weight decay, factor on the learning rate)."""
    groups: dict[tuple[float, float], list[str]] = {}
    for name in parameters:
        role = role_of(name, model)
        key = (config.weight_decay if role.decays else 0.0, rate_factor(role, model))
        groups.setdefault(key, []).append(name)
    return groups
