"""Validation: loss and bits per byte of held-out samples, by source."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from gristmill.training.batches import Samples, collate
from gristmill.training.engine.forward_backward import ForwardBackward
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.sums import sum_over_world


class Validation:
    """Evaluates samples 0 to count - 1 of the held-out split, distributed over the data ranks.

    bytes_per_token by source converts nats per token to bits per byte; sources without it have no bits per byte."""

    def __init__(
        self,
        samples: Samples,
        count: int,
        bytes_per_token: Mapping[str, float],
        forward_backward: ForwardBackward,
        mesh: Mesh,
        mask_documents: bool,
    ):
        self.forward_backward, self.mesh, self.bytes_per_token = forward_backward, mesh, dict(bytes_per_token)
        share = -(-count // mesh.data.size)
        numbers = range(
            mesh.data.rank * share, (mesh.data.rank + 1) * share
        )  # all ranks make equally many forward_backward
        batch = collate(samples, numbers, mask_documents)
        del batch["samples"]  # without them there is no dropout
        batch["weights"][max(0, count - numbers.start) :] = 0.0
        self._batch = {name: values.to(mesh.device) for name, values in batch.items()}
        self._sources = [samples.source_of(k) for k in numbers]
        self._names = sorted({samples.source_of(k) for k in range(count)})

    def run(self) -> dict[str, Any]:
        """{"loss": nats a token over all, "sources": {name: {"loss", "bits_per_byte"}}}."""
        losses_b2 = self.forward_backward.evaluate(self._batch)
        nll_b = None if losses_b2 is None else losses_b2[:, 1].double().tolist()
        weight_b = self._batch["weights"].sum(dim=1, dtype=torch.float64).tolist()
        own = []
        for name in self._names:
            rows = [row for row, source in enumerate(self._sources) if source == name]
            own += [sum(nll_b[row] for row in rows) if nll_b else 0.0, sum(weight_b[row] for row in rows)]
        sums = sum_over_world(own, self.mesh)
        copies = self.mesh.world.size / self.mesh.data.size
        nlls = dict(zip(self._names, (value / self.mesh.tensor.size for value in sums[::2]), strict=True))
        weights = dict(zip(self._names, (value / copies for value in sums[1::2]), strict=True))
        return {
            "loss": sum(nlls.values()) / sum(weights.values()),
            "sources": {name: self._scores(name, nlls[name] / weights[name]) for name in self._names},
        }

    def _scores(self, source: str, loss: float) -> dict[str, float]:
        if source not in self.bytes_per_token:
            return {"loss": loss}
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[source]}
