"""A tile of ring attention by torch's fused kernels, which hold no scores: memory-efficient attention on GPUs, and the
CPU's flash kernel, on which the tests run."""

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, H query heads, G key/value heads, N queries, S keys, K head width

ALIGNED = 8  # keys: a bias row of GPUs begins at a multiple of 16 bytes
PADDED = 32  # queries: the log-sum-exps that GPU kernels return and take


def fused_tile(
    query_BHNK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(softmax(scale q k^T + bias) v, log-sum-exp of the scores [B, H, N]); rows that see nothing: (0, -inf)."""
    heads, queries = query_BHNK.shape[1:3]
    key, value, mask = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(bias, query_BHNK, key_BGSK)
    if query_BHNK.device.type == "cpu":
        mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHNK, key, value, attn_mask=mask, scale=scale
        )
    else:
        mixed, log_sum, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query_BHNK, key, value, mask, True, scale=scale
        )
        log_sum = log_sum[:, :, :queries]
    if bias is None:
        return mixed, log_sum
    blind = (bias == -torch.inf).all(dim=-1)
    return mixed.masked_fill(blind.unsqueeze(-1), 0), log_sum.masked_fill(blind, -torch.inf)


def fused_tile_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradient_BHNK: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value. results: mixed [B, H, N, K] and log-sum-exp [B, H, N] over all keys, not of this tile,
    which is all that the kernels need to give this tile's share."""
    query, key_BGSK, value_BGSK = inputs
    mixed, log_sum = results
    heads, groups = query.shape[1], key_BGSK.shape[1]
    key, value, mask = _copies(key_BGSK, heads), _copies(value_BGSK, heads), _bias(bias, query, key_BGSK)
    gradient_BHNK = gradient_BHNK.to(query.dtype)
    if query.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BHNK, query, key, value, mixed, log_sum, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        padded = F.pad(log_sum, (0, -log_sum.shape[-1] % PADDED), value=torch.inf).contiguous()
        none = torch.empty(0, dtype=torch.int64, device=query.device)
        found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient_BHNK, query, key, value, mask, mixed, padded, none, none, 0.0, [True] * 3 + [False], scale=scale
        )
    query_gradient, *copied = found[:3]
    key_gradient, value_gradient = (part.unflatten(1, (groups, -1)).sum(dim=2) for part in copied)
    return query_gradient, key_gradient, value_gradient


def _copies(x_BGSK: Tensor, heads: int) -> Tensor:
    """A key/value head for each query head."""
    copies = heads // x_BGSK.shape[1]
    return x_BGSK if copies == 1 else x_BGSK.repeat_interleave(copies, dim=1)


def _bias(bias: Tensor | None, query_BHNK: Tensor, key_BGSK: Tensor) -> Tensor | None:
    """The bias in the dtype of the queries; on GPUs [B, H, N, S] with rows at multiples of 16 bytes."""
    if bias is None:
        return None
    bias = bias.to(query_BHNK.dtype)
    if query_BHNK.device.type == "cpu":
        return bias
    keys = key_BGSK.shape[2]
    aligned = F.pad(bias, (0, -keys % ALIGNED))[..., :keys]
    return aligned.expand(*query_BHNK.shape[:3], keys)
