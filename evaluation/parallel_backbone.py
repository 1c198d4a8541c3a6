"""A model too large for one device: cut over tensor ranks and pipeline stages, asked as if it were whole.

Every rank of one copy of the model makes the same calls in the same order and gets the same answers."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.evaluation.transformer_backbone import TransformerBackbone
from gristmill.training.checkpoint import load, read_card, verified
from gristmill.training.config import LayoutConfig, ModelConfig
from gristmill.training.model.initial import fill, stored_name
from gristmill.training.model.plan import Plan
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.cuts import stage_parts
from gristmill.training.parallel.mesh import Mesh

# B rows, T tokens, D width, V vocabulary, N picked positions; Vt = this tensor rank's share of V


class ParallelBackbone(TransformerBackbone):
    """One stage a pipeline rank. Hidden states go down the stages and the last ones to everybody; logits are gathered
    over the tensor ranks of the last stage and sent to everybody."""

    def __init__(self, part: Transformer, context: int, mesh: Mesh):
        self.model = part.eval().requires_grad_(False)
        self.context, self.mesh = context, mesh
        self.vocab_size, self.device = part.vocab_size, mesh.device

    @property
    def _stage(self) -> int:
        return self.mesh.pipeline.rank

    @property
    def _last(self) -> int:
        return self.mesh.pipeline.size - 1

    def _run(self, tokens_BT: Tensor, plan: Plan, states: tuple[Any, ...] | None) -> tuple[Tensor, tuple[Any, ...]]:
        x_BTD = self._received(tokens_BT) if self._stage else self._embedded(tokens_BT, plan)
        x_BTD, grown = self._through_layers(x_BTD, plan, states)
        if self._last == 0:
            return self.model.final_norm(x_BTD), grown
        if self._stage < self._last:
            dist.send(x_BTD.contiguous(), group=self.mesh.pipeline.group, group_dst=self._stage + 1)
            hidden_BTD = torch.empty_like(x_BTD)
        else:
            hidden_BTD = self.model.final_norm(x_BTD).contiguous()
        dist.broadcast(hidden_BTD, group=self.mesh.pipeline.group, group_src=self._last)
        return hidden_BTD, grown

    def _received(self, tokens_BT: Tensor) -> Tensor:
        shape = (*tokens_BT.shape, self.model.config.width)
        x_BTD = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        dist.recv(x_BTD, group=self.mesh.pipeline.group, group_src=self._stage - 1)
        return x_BTD

    def head(self, hidden_ND: Tensor) -> Tensor:
        if self._stage == self._last:
            logits_NV = self._gathered(super().head(hidden_ND))
        else:
            logits_NV = torch.empty(len(hidden_ND), self.vocab_size, dtype=_logit_dtype(hidden_ND), device=self.device)
        if self._last:
            dist.broadcast(logits_NV, group=self.mesh.pipeline.group, group_src=self._last)
        return logits_NV

    def _gathered(self, logits_NVt: Tensor) -> Tensor:
        """The ranks hold ceil(V / size) columns each, the last one what is left."""
        axis = self.mesh.tensor
        if axis.size == 1:
            return logits_NVt
        share = math.ceil(self.vocab_size / axis.size)
        padded = torch.nn.functional.pad(logits_NVt, (0, share - logits_NVt.shape[1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in range(axis.size)]
        dist.all_gather(pieces, padded, group=axis.group)
        return torch.cat(pieces, dim=1)[:, : self.vocab_size].contiguous()


def load_parallel(checkpoint: Path, layout: LayoutConfig, mesh: Mesh, dtype: torch.dtype) -> ParallelBackbone:
    """This rank's part of a checkpoint that any layout saved. layout: tensor and pipeline of this evaluation, with
    sequence_parallel off, so that any number of tokens can be read."""
    verified(checkpoint)
    card = read_card(checkpoint)
    config = ModelConfig.model_validate(card["model"])
    part = stage_parts(config, card["vocab_size"], layout)[mesh.pipeline.rank]
    model = Transformer(config, card["vocab_size"], mesh, layout, part, dtype)
    fill(model, lambda _, parameter: torch.empty_like(parameter, device=mesh.device))
    names = {f"model.{stored_name(name, config)}": value.detach() for name, value in model.named_parameters()}
    load(checkpoint, names, mesh)
    return ParallelBackbone(model.to(dtype), config.context, mesh)


def _logit_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
