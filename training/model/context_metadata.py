"""The context axis in the attention metadata: which tokens each context rank has, and what its attention computes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gristmill.training.layout_config import ContextMethod
from gristmill.training.model.ring_attention import RingPlan, VisibleTokens, ring_plan, visible_tokens
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.context import (
    TokenShares,
    balanced_shares,
    contiguous_shares,
    token_shares,
    zigzag_shares,
)
from gristmill.training.parallel.mesh import Axis

# B batch, T tokens of a sample, C context ranks, Tc tokens of a context rank


def context_metadata(
    config: ModelConfig, axis: Axis, method: ContextMethod, documents_BT: Tensor | None, x: Tensor, tokens: int
) -> tuple[TokenShares, dict[int | None, VisibleTokens]]:
    """The shares, and for the ring which tokens each token sees, by window. All stages of a pipeline get the same from
    the same documents. x: on the device of the model."""
    if method == "all_to_all":
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    causal, windows = config.attention == "causal", config.attention_windows
    if not windows:
        return token_shares(axis, contiguous_shares(tokens, axis.size), x.device), {}
    visible = {window: visible_tokens(tokens, documents_BT, window, causal) for window in set(windows)}
    work_T = torch.stack([visible[window].work_T for window in windows]).sum(dim=0)
    return token_shares(axis, ring_shares(work_T, axis.size), x.device), visible


def ring_shares(work_T: Tensor, ranks: int) -> Tensor:
    """Zig-zag shares, or balanced ones where those are better: int64[C, Tc]. work_T: of each token."""
    choices = [zigzag_shares(len(work_T), ranks), balanced_shares(work_T, ranks)]
    return min(choices, key=lambda index_CT: work_imbalance(work_T, index_CT))


def work_imbalance(work_T: Tensor, index_CT: Tensor) -> float:
    """The work of the busiest rank over the mean. work [1, 2, 3, 4], shares [[0, 1], [2, 3]] -> 1.4."""
    loads_C = work_T[index_CT].double().sum(dim=1)
    return (loads_C.max() / loads_C.mean()).item()


def ring_plans(
    visible: Mapping[int | None, VisibleTokens], shares: TokenShares, slopes_H: Tensor | None
) -> dict[int | None, RingPlan] | None:
    """What the layers of each window compute; None without a ring."""
    return {window: ring_plan(each, shares, slopes_H) for window, each in visible.items()} or None
