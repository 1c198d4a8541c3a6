"""The experts of a mixture-of-experts layer: one MLP each, applied to the tokens routed to it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.layer_config import LayerConfig
from gristmill.training.model.expert_loop import loop_swiglu
from gristmill.training.model.grouped_linear import Runs, grouped_linear, padded_positions, uses_grouped
from gristmill.training.model.mlp import gelu_approximation
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.expert_parallel import BIAS, INPUT, OUTPUT, OUTPUT_BIAS, ExpertAxis

# N rows sorted by expert, D width, E experts, Et = experts of this rank, Ft = this rank's share of an expert's width


class ExpertLinear(nn.Module):
    """The weights of one linear layer of all experts, [E, outputs, inputs]."""

    def __init__(self, axis: ExpertAxis, shape: tuple[int, int, int], placed: str, bias: bool):
        super().__init__()
        self.axis, self.placed = axis, placed
        self.bias_placed = OUTPUT_BIAS if placed == INPUT else BIAS
        self.weight = axis.parameter(shape, placed)
        self.bias = axis.parameter(shape[:2], self.bias_placed) if bias else None

    def forward(self, x_ND: Tensor, runs: Runs) -> Tensor:
        y_NF = grouped_linear(x_ND, self.local_weight(x_ND.dtype), runs)
        if self.bias is None:
            return y_NF
        bias_EF = self.axis.local(self.bias, self.bias_placed, x_ND.dtype)
        if self.bias_placed == OUTPUT_BIAS and not self.axis.first_share:
            bias_EF = bias_EF * 0
        return y_NF + bias_EF[_expert_of_row(runs, len(x_ND), len(bias_EF), x_ND.device)]

    def local_weight(self, dtype: torch.dtype) -> Tensor:
        """This rank's experts and share of their width."""
        return self.axis.local(self.weight, self.placed, dtype)


class Experts(nn.Module):
    """The experts of one layer: SwiGLU or GELU MLPs of the layer's expert width."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, axis: ExpertAxis):
        super().__init__()
        self.gated, self.approximate = layer.mlp == "swiglu", gelu_approximation(config)
        wide = (layer.experts, layer.expert_hidden, config.width)
        narrow = (layer.experts, config.width, layer.expert_hidden)
        self.gate = ExpertLinear(axis, wide, OUTPUT, config.mlp_biases) if self.gated else None
        self.up = ExpertLinear(axis, wide, OUTPUT, config.mlp_biases)
        self.down = ExpertLinear(axis, narrow, INPUT, config.mlp_biases)

    def forward(self, x_ND: Tensor, counts_Et: Tensor) -> Tensor:
        """Results of the rows, which are sorted by expert; counts_Et: rows of each expert of this rank. Rows behind the
        last expert's come out as zeros."""
        if not uses_grouped(x_ND):
            return self._mlp(x_ND, Runs(sizes=tuple(counts_Et.tolist())))
        return self._grouped(x_ND, counts_Et)

    def _grouped(self, x_ND: Tensor, counts_Et: Tensor) -> Tensor:
        """On runs that are padded for the grouped matmul; nothing waits for the device. Rows behind the last expert's
        go through it as zeros, so that every row of the buffer is defined."""
        has_expert_N1 = (torch.arange(len(x_ND), device=x_ND.device) < counts_Et.sum()).unsqueeze(1)
        counts_Et = torch.cat([counts_Et[:-1], len(x_ND) - counts_Et[:-1].sum(dim=0, keepdim=True)])
        position_N, ends_Et, rows = padded_positions(counts_Et, len(x_ND))
        padded_RD = x_ND.new_zeros(rows, x_ND.shape[1]).index_copy(0, position_N, torch.where(has_expert_N1, x_ND, 0))
        y_ND = self._mlp(padded_RD, Runs(ends_E=ends_Et)).index_select(0, position_N)
        return torch.where(has_expert_N1, y_ND, 0)

    def _mlp(self, x_ND: Tensor, runs: Runs) -> Tensor:
        if self.gate is not None and self.up.bias is None and runs.sizes is not None:
            weights = (linear.local_weight(x_ND.dtype) for linear in (self.gate, self.up, self.down))
            return loop_swiglu(x_ND, *weights, runs.sizes)
        if self.gate is None:
            hidden_NFt = F.gelu(self.up(x_ND, runs), approximate=self.approximate)
        else:
            hidden_NFt = F.silu(self.gate(x_ND, runs)) * self.up(x_ND, runs)
        return self.down(hidden_NFt, runs)


def _expert_of_row(runs: Runs, rows: int, experts: int, device: torch.device) -> Tensor:
    """int64[rows]; rows behind the last run point at the last expert."""
    ends_E = runs.ends_E if runs.sizes is None else torch.tensor(runs.sizes, device=device).cumsum(0)
    row_N = torch.arange(rows, device=device)
    return torch.searchsorted(ends_E, row_N.to(ends_E.dtype), right=True).clamp(max=experts - 1)
