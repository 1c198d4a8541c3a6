"""The peer of optimizers in host memory: torch's FSDP2 with `CPUOffloadPolicy`, which keeps parameters, gradients and
optimizer state in host memory and updates them all there, on the same model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from support.training_step import SEED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import PRECISIONS, build_local_model
from gristmill.training.engine.passes import output_of, scaled_sum
from gristmill.training.model.init import roles_of
from gristmill.training.parallel.mesh import silence_redistribution, single_process


class FsdpOffload:
    """Layers and the rest of the model are units of FSDP; torch's fused AdamW updates on the host. The gradient's
    norm is computed and no gradient is clipped."""

    def __init__(self, model: ModelConfig, vocab: int, train: TrainConfig, device: torch.device):
        mesh, precision = init_device_mesh(device.type, (1,)), PRECISIONS[train.precision]
        parts = build_local_model(model, vocab, train, single_process(), SEED)  # the same initial weights
        (self.model,) = parts.stages.values()
        policy = MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self.parameters = dict(self.model.named_parameters())
        config, roles = train.optimizer, roles_of(self.parameters, model)
        groups: dict[float, list[nn.Parameter]] = {config.weight_decay: [], 0.0: []}
        for name, parameter in self.parameters.items():
            groups[config.weight_decay if roles[name].decays else 0.0].append(parameter)
        self.optimizer = AdamW(
            [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )
        self.loss = causal_loss()

    def __call__(self, batch: dict[str, Tensor]) -> float:
        """The mean loss before the update."""
        tokens = batch["tokens"].numel()
        with output_of([self.model], self.loss):
            losses_bn = self.model(batch["tokens"], **batch)
            scaled_sum(losses_bn, [1 / tokens]).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters.values()])
        assert torch.isfinite(norm), "a gradient is not finite"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses_bn.detach()[:, 0].sum().item() / tokens


@contextmanager
def process_group_of_one(device: torch.device) -> Iterator[None]:
    """FSDP needs one."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    silence_redistribution()
    try:
        yield
    finally:
        dist.destroy_process_group()
