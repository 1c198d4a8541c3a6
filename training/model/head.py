"""The head: final hidden states to logits over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.training.loss import Scoring
from gristmill.training.model.mlp import gelu_approximation
from gristmill.training.model.norm import Norm
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B rows, T tokens, D width, V vocabulary; Tt, Vt = this tensor rank's share
# E columns of the product: D, or D and those of the bias

BIAS_COLUMNS = 8  # the bias is a column of the matrix; the other seven keep its rows a multiple of 16 bytes


class Head(nn.Module):
    """norm(gelu(x W + b)) where the model has a transform (BERT), then the product with the output table. Tied, its
    weight is the embedding's."""

    def __init__(self, config: ModelConfig, vocab_size: int, tensor: TensorAxis, z_loss: float):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((vocab_size, config.width), Sharding.OUTPUT)
        scale = config.mup_base_width / config.width if config.initialisation == "mup" else 1.0
        scale /= config.scales.logit_divisor
        self.scoring = Scoring(tensor, vocab_size, scale, config.logit_softcap, z_loss)
        self.transform = HeadTransform(config, tensor) if config.head_transform else None
        self.bias = tensor.parameter((vocab_size,), Sharding.OUTPUT) if config.head_bias else None

    def forward(self, hidden_BTtD: Tensor) -> Tensor:
        """This rank's logits [B, T, Vt], in float32 or better."""
        return self.scoring.logits(*self._factors(hidden_BTtD, hidden_BTtD.dtype))

    def inputs(self, hidden_BTtD: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the logits: hidden states [B, T, E] and this rank's rows of the table [Vt, E], in the table's
        own dtype, so that their gradient is summed in it. FSDP's hooks run before and after, as they do for `forward`,
        so neither calls the other."""
        return self._factors(hidden_BTtD, None)

    def _factors(self, hidden_BTtD: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        if self.transform is not None:
            hidden_BTtD = self.transform(hidden_BTtD)
        hidden_BTD = self.tensor.enter(hidden_BTtD)
        matrix_VtD = self.tensor.local(self.weight, Sharding.OUTPUT, dtype or self.weight.dtype)
        if self.bias is None:
            return hidden_BTD, matrix_VtD
        bias_Vt = self.tensor.local(self.bias, Sharding.OUTPUT, matrix_VtD.dtype)
        ones = F.pad(hidden_BTD.new_ones(*hidden_BTD.shape[:-1], 1), (0, BIAS_COLUMNS - 1))
        columns = F.pad(bias_Vt.unsqueeze(1), (0, BIAS_COLUMNS - 1))
        return torch.cat([hidden_BTD, ones], dim=-1), torch.cat([matrix_VtD, columns], dim=1)


class HeadTransform(nn.Module):
    """norm(gelu(x W + b)) before the output table (BERT, arXiv 1810.04805), on this rank's tokens."""

    def __init__(self, config: ModelConfig, tensor: TensorAxis):
        super().__init__()
        self.tensor, self.approximate = tensor, gelu_approximation(config)
        self.weight = tensor.parameter((config.width, config.width), Sharding.REPLICATED)
        self.bias = tensor.parameter((config.width,), Sharding.REPLICATED)
        self.norm = Norm(config, tensor, config.width)

    def forward(self, x_BTtD: Tensor) -> Tensor:
        weight_DD = self.tensor.local(self.weight, Sharding.REPLICATED, x_BTtD.dtype)
        bias_D = self.tensor.local(self.bias, Sharding.REPLICATED, x_BTtD.dtype)
        return self.norm(F.gelu(F.linear(x_BTtD, weight_DD, bias_D), approximate=self.approximate))


class FrozenHead:
    """The head of a frozen model: this tensor rank's rows of its table, gathered over the data ranks."""

    def __init__(self, scoring: Scoring, matrix_VtD: Tensor):
        self.scoring, self.matrix_VtD = scoring, matrix_VtD

    def __call__(self, hidden_BTtD: Tensor) -> Tensor:
        return self.scoring.logits(*self.inputs(hidden_BTtD))

    def inputs(self, hidden_BTtD: Tensor) -> tuple[Tensor, Tensor]:
        return self.scoring.tensor.enter(hidden_BTtD), self.matrix_VtD
