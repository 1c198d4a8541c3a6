"""Load of the experts over a step, and the state updated from it: the balancing bias and the load of the last batch."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.training.model.router import routers
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import Mesh

# E experts


class ExpertBalance:
    """The routers of this process. All processes call the methods in the same order."""

    def __init__(self, stages: Iterable[Transformer], mesh: Mesh):
        self.routers = [router for part in stages for router in routers(part).values()]
        self.mesh = mesh

    @torch.no_grad()
    def take_counts(self) -> list[Tensor]:
        """Number of tokens of the global batch routed to each expert of each router; resets the counters."""
        counts = [router.step_counts.clone() for router in self.routers]
        for router in self.routers:
            router.step_counts.zero_()
        if self.mesh.stage.size > 1 and counts:
            every = torch.cat(counts)
            dist.all_reduce(every, group=self.mesh.stage.group)
            counts = list(every.split([len(one) for one in counts]))
        return counts

    @torch.no_grad()
    def update(self, counts: list[Tensor]) -> None:
        """bias += rate x sign(mean - count) (arXiv 2408.15664, algorithm 1)."""
        for router, counts_E in zip(self.routers, counts, strict=True):
            load_E = counts_E.double()
            if router.balance_bias is not None:
                step_E = router.config.bias_update_rate * (load_E.mean() - load_E).sign()
                router.balance_bias += step_E.to(router.balance_bias.dtype)
            if router.last_load is not None:
                router.last_load.copy_(load_E)

    def worst_load(self, counts: list[Tensor]) -> float:
        """The highest load of an expert over the mean of its layer, over all layers of the model."""
        ratios = [(counts_E.max() / counts_E.double().mean()).item() for counts_E in counts]
        worst = torch.tensor(max(ratios, default=0.0), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.distributed:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh.world.group)
        return worst.item()
