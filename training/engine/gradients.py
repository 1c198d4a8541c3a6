"""The gradients of one step after the backward pass: completed, unscaled, their norm, clipped."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gristmill.training.engine.local_model import LocalModel
from gristmill.training.engine.passes import ForwardBackward, GradientAccumulation
from gristmill.training.model.loss import upcast_dtype
from gristmill.training.optim.offload import OffloadedOptimizer, StreamedOptimizer
from gristmill.training.optim.optimizer import local_gradient
from gristmill.training.parallel.mesh import Mesh, local, sum_over_world
from gristmill.training.parallel.offload.weight_stream import CHUNK_ELEMENTS


class Gradients:
    """Where the backward pass leaves them: on the parameters. Every process makes the same calls: begin, then the
    passes, ready, square_sum, clip unless the step is skipped, clear."""

    def __init__(self, model: LocalModel, mesh: Mesh):
        self.model, self.mesh, self.factor = model, mesh, 1.0
        self._norms: dict[str, Tensor] = {}  # of those that were taken before all were ready
        self._shares = norm_shares(model.norm_parameters)

    def begin(self, factor: float) -> None:
        """factor: what each gradient is multiplied by, the inverse of the loss scale."""
        self.factor = factor

    def ready(self) -> None:
        self.model.fill_missing_gradients()
        self.model.sum_tied_gradients()
        scale_gradients(self.model.parameters.values(), self.factor)

    def square_sum(self) -> Tensor | float:
        """This process's share of the square of the global norm; summed over all, each element counts once."""
        return sum_of_squares(self._all_norms(), self._shares)

    def _all_norms(self) -> list[Tensor]:
        late = [name for name in self.model.norm_names if name not in self._norms]
        late_norms = dict(zip(late, gradient_norms([self.model.parameters[name] for name in late]), strict=True))
        return [(self._norms | late_norms)[name] for name in self.model.norm_names]

    def clip(self, norm: float, max_norm: float | None) -> None:
        clip(self.model.parameters.values(), norm, max_norm)

    def clear(self) -> None:
        self.model.clear_gradients()
        self._norms.clear()


class HostGradients(Gradients):
    """Copied to host memory as the backward pass completes each, and given up on the device where the host updates the
    parameter. Their norms are taken on the device before.

    With a pipeline a stage's gradients are complete only at its end, and a tied table's after their sum: those are
    copied once all are ready."""

    def __init__(self, optimizer: OffloadedOptimizer, forward_backward: ForwardBackward, model: LocalModel, mesh: Mesh):
        super().__init__(model, mesh)
        self.optimizer = optimizer
        self._last_backward = False
        if not isinstance(forward_backward, GradientAccumulation):
            return
        forward_backward.before_backward = self._before_backward
        for name, parameter in model.parameters.items():
            if name in optimizer.host_gradients and name not in model.tied_names:
                parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: self._completed(name))

    def ready(self) -> None:
        self._last_backward = False
        self.model.fill_missing_gradients(except_for=self._norms)
        self.model.sum_tied_gradients()
        kept = [value for name, value in self.model.parameters.items() if name not in self._norms]
        scale_gradients(kept, self.factor)
        for name in self.optimizer.host_gradients:
            if name not in self._norms:
                self._flush(name)

    @torch.no_grad()
    def clip(self, norm: float, max_norm: float | None) -> None:
        self.optimizer.to_host.finish()
        if max_norm is not None and norm > max_norm:
            own = [
                local(gradient)
                for parameter in self.model.parameters.values()
                if (gradient := parameter.grad) is not None
            ]
            for gradients in (own, list(self.optimizer.host_gradients.values())):
                if gradients:
                    torch._foreach_mul_(gradients, max_norm / norm)

    def _before_backward(self, last: bool) -> None:
        self._last_backward = last

    def _completed(self, name: str) -> None:
        if self._last_backward:
            scale_gradients([self.model.parameters[name]], self.factor)
            self._flush(name)

    @torch.no_grad()
    def _flush(self, name: str) -> None:
        parameter = self.model.parameters[name]
        (self._norms[name],) = gradient_norms([parameter])
        self.optimizer.to_host.copy(self.optimizer.host_gradients[name], local_gradient(parameter))
        if name not in self.optimizer.updated_on_device:
            parameter.grad = None


class StreamedGradients(Gradients):
    """Those of streamed weights are added to the store as each is completed, micro-batch by micro-batch, and given up;
    the last time their norms are taken. Clipping is left to the optimizer, which reads them next."""

    def __init__(
        self, optimizer: StreamedOptimizer, forward_backward: GradientAccumulation, model: LocalModel, mesh: Mesh
    ):
        super().__init__(model, mesh)
        self.optimizer = optimizer
        self._begun: set[str] = set()  # those that hold the sum of earlier micro-batches
        self._last_backward = False
        forward_backward.before_backward = self._before_backward
        forward_backward.reduces_each = True
        for name in optimizer.stored:
            model.parameters[name].register_post_accumulate_grad_hook(
                lambda parameter, name=name: self._completed(name)
            )

    def ready(self) -> None:
        streamed = self.optimizer.stored.keys()
        for name in streamed - self._norms.keys():  # the objective does not use these
            self.model.parameters[name].grad = torch.zeros_like(self.model.parameters[name])
            self._last_backward = True
            self._completed(name)
        self._last_backward = False
        self.model.fill_missing_gradients(except_for=streamed)
        self.model.sum_tied_gradients()
        scale_gradients([value for name, value in self.model.parameters.items() if name not in streamed], self.factor)

    def clip(self, norm: float, max_norm: float | None) -> None:
        own = [value for name, value in self.model.parameters.items() if name not in self.optimizer.stored]
        clip(own, norm, max_norm)
        self.optimizer.gradient_factor = max_norm / norm if max_norm is not None and norm > max_norm else 1.0

    def clear(self) -> None:
        super().clear()
        self._begun.clear()

    def _before_backward(self, last: bool) -> None:
        self._last_backward = last

    @torch.no_grad()
    def _completed(self, name: str) -> None:
        parameter, stored, store = (
            self.model.parameters[name],
            self.optimizer.host_gradients[name],
            self.optimizer.store,
        )
        own = local_gradient(parameter).view(-1)
        if name in self._begun:
            for start in range(0, own.numel(), CHUNK_ELEMENTS):
                part = own[start : start + CHUNK_ELEMENTS]
                before = torch.empty(part.shape, dtype=part.dtype)
                store.read(stored, before, start)
                part.add_(before.to(part.device))
        self._begun.add(name)
        if self._last_backward:
            scale_gradients([parameter], self.factor)
            (self._norms[name],) = gradient_norms([parameter])
        store.write(stored, own.cpu())
        parameter.grad = None


def gradients_of(optimizer: object, forward_backward: ForwardBackward, model: LocalModel, mesh: Mesh) -> Gradients:
    """The gradients as the optimizer takes them."""
    if isinstance(optimizer, OffloadedOptimizer):
        return HostGradients(optimizer, forward_backward, model, mesh)
    if isinstance(optimizer, StreamedOptimizer):
        assert isinstance(forward_backward, GradientAccumulation), "check_layout refuses pipelines"
        return StreamedGradients(optimizer, forward_backward, model, mesh)
    return Gradients(model, mesh)


# Global gradient norm over all processes, each element counted once, and gradient clipping.


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Square root of the sum of squares. Parameters may lie on different meshes: each process adds its shards, divided
    by the number of processes that hold the same shard, and one all-reduce over the world sums them."""
    parameters = list(parameters)
    (squares,) = sum_over_world([sum_of_squares(gradient_norms(parameters), norm_shares(parameters))], mesh)
    return squares.sqrt()


@torch.no_grad()
def gradient_norms(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The norm of this process's shard of each parameter's gradient, in float32 or better."""
    gradients = [local_gradient(parameter) for parameter in parameters]
    if gradients and gradients[0].device.type == "cuda" and all(tensor.numel() for tensor in gradients):
        return list(torch._foreach_norm(gradients, 2, upcast_dtype(gradients[0])))
    return [_norm(gradient) for gradient in gradients]


def _norm(gradient: Tensor) -> Tensor:
    """By rows: a float32 norm of 50 million elements in one go is off by 0.4 % on CPU (torch 2.13)."""
    rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=upcast_dtype(gradient))
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


@torch.no_grad()
def sum_of_squares(norms: Sequence[Tensor], shares: Tensor | None) -> Tensor | float:
    """This process's share of the square of the global norm, float64, from the `gradient_norms` of the parameters and
    their `norm_shares`."""
    if not norms:
        return 0.0
    squares = torch.stack([norm.to(torch.float64) for norm in norms]).square()
    return squares.sum() if shares is None else squares @ shares


def norm_shares(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """1 / the number of ranks that hold the same shard, for each parameter, float64 on the device; None where all are
    1. Made once: it is a copy to the device."""
    shares = [1 / copies(parameter) for parameter in parameters]
    if set(shares) <= {1.0}:
        return None
    return torch.tensor(shares, dtype=torch.float64, device=parameters[0].device)


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float | None) -> None:
    """Scales all gradients so that their norm is at most `max_norm`."""
    if max_norm is not None and norm > max_norm:
        scale_gradients(parameters, max_norm / norm)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    gradients = [local_gradient(parameter) for parameter in parameters]
    if factor != 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def copies(parameter: Tensor) -> int:
    """Number of processes that hold the same shard of the parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    number = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number *= parameter.device_mesh.size(axis)
    return number
