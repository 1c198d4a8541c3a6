"""Validation: loss and bits per byte of held-out samples, by source."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.training.batches import SampleSource, collate
from gristmill.training.engine.forward_backward import ForwardBackward
from gristmill.training.objectives.objective import TermSpec
from gristmill.training.parallel.mesh import Mesh
from gristmill.training.sums import sum_over_world
from gristmill.training.teacher import Teacher


class Validation:
    """Evaluates samples 0 to count - 1 of the held-out split, distributed over the data ranks.

    bytes_per_token by source converts nats per token to bits per byte; sources without it have no bits per byte."""

    def __init__(
        self,
        source: SampleSource,
        count: int,
        bytes_per_token: Mapping[str, float],
        forward_backward: ForwardBackward,
        mesh: Mesh,
    ):
        self.forward_backward, self.mesh, self.bytes_per_token = forward_backward, mesh, dict(bytes_per_token)
        self.terms: Sequence[TermSpec] = forward_backward.loss.terms if forward_backward.loss is not None else ()
        share = -(-count // mesh.data.size)
        first = mesh.data.rank * share
        batch = collate(source, range(first, first + share))  # all ranks make equally many forward passes
        self._sources = [source.source_of(k) for k in range(first, min(first + share, count))]
        self._names = sorted({source.source_of(k) for k in range(count)})
        self._counts = {term.name: term.counts(batch).tolist() for term in self.terms}
        del batch["samples"]  # without them there is no dropout
        self._batch = {name: values.to(mesh.device) for name, values in batch.items()}
        self.teacher: Teacher | None = None

    def run(self) -> dict[str, Any]:
        """{"loss": the first term's mean over all, "sources": {name: {"loss", "bits_per_byte"}}}, and with several
        terms {"terms": {name: mean}}."""
        taught = {} if self.teacher is None else self.teacher.outputs(self._batch, tokens=0)
        losses_bn = self.forward_backward.evaluate(self._batch | taught)
        losses_nb = None if losses_bn is None else losses_bn.double().T.tolist()
        own = []
        for number, term in enumerate(self.terms):
            for name in self._names:
                rows = [row for row, source in enumerate(self._sources) if source == name]
                own.append(sum(losses_nb[number][row] for row in rows) if losses_nb else 0.0)
                own.append(sum(self._counts[term.name][row] for row in rows))
        sums = sum_over_world(own, self.mesh).tolist()
        mesh = self.mesh
        copies = mesh.world.size / mesh.data.size
        totals = [value / (mesh.tensor.size * mesh.context.size) for value in sums[::2]]
        counts = [value / copies for value in sums[1::2]]
        width = len(self._names)
        by_term = {
            term.name: (totals[width * number : width * (number + 1)], counts[width * number : width * (number + 1)])
            for number, term in enumerate(self.terms)
        }
        of_sources, counts = by_term[self.terms[0].name]
        result = {
            "loss": _mean(sum(of_sources), sum(counts)),
            "sources": {
                name: self._scores(name, _mean(total, count))
                for name, total, count in zip(self._names, of_sources, counts, strict=True)
            },
        }
        if len(self.terms) > 1:
            result["terms"] = {name: _mean(sum(total), sum(count)) for name, (total, count) in by_term.items()}
        return result

    def _scores(self, source: str, loss: float) -> dict[str, float]:
        if source not in self.bytes_per_token:
            return {"loss": loss}
        return {"loss": loss, "bits_per_byte": loss / math.log(2) / self.bytes_per_token[source]}


def _mean(total: float, count: float) -> float:
    return total / max(count, 1.0)
