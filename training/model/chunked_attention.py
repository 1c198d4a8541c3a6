"""Causal attention inside chunks of consecutive tokens of a document, with a bias for each distance."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.loss import upcast

# B rows, T tokens, Z width of queries and keys, V width of values; n blocks of C tokens, C tokens of a chunk
# Q queries of a block, S keys that they may see


def position_in_document(documents_BT: Tensor | None, before_B: Tensor | None, like_BT: Tensor) -> Tensor:
    """int64[B, T]: number of tokens of its document before each token. before_B: for the document of the first token,
    how many there were before these; None: none."""
    rows, tokens = like_BT.shape[:2]
    index_BT = torch.arange(tokens, device=like_BT.device).expand(rows, -1)
    first_B1 = 0 if before_B is None else before_B.unsqueeze(1)
    if documents_BT is None:
        return index_BT + first_B1
    starts_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    start_BT = torch.where(starts_BT, index_BT, 0).cummax(dim=1).values
    return index_BT - start_BT + torch.where(start_BT == 0, first_B1, 0)


def chunk_numbers(position_BT: Tensor, chunk: int) -> Tensor:
    """int64[B, T]: equal for the tokens of one chunk; 0 for those that continue the chunk of the token before.

    positions 2, 3, 0, 1 and 2 with chunks of 2 -> 1, 1, 2, 2, 3."""
    return (position_BT % chunk == 0).cumsum(dim=1)


def attend_in_chunks(query_BTZ: Tensor, key_BTZ: Tensor, value_BTV: Tensor, bias_C: Tensor) -> Tensor:
    """Of rows that are one document each: token t sees those of its chunk t // C up to itself. softmax(q k^T + bias
    of the distance) v, with scores and softmax in float32 or better."""
    tokens, size = query_BTZ.shape[1], min(len(bias_C), query_BTZ.shape[1])
    spare = -tokens % size

    def blocks(x_BTF: Tensor) -> Tensor:
        return (F.pad(x_BTF, (0, 0, 0, spare)) if spare else x_BTF).unflatten(1, (-1, size))

    back_QS = _back(size, size, query_BTZ.device)
    mixed_BnQV = _attend(blocks(query_BTZ), blocks(key_BTZ), blocks(value_BTV), (bias_C, back_QS, back_QS >= 0))
    return mixed_BnQV.flatten(1, 2)[:, :tokens]


def attend_in_packed_chunks(
    query_BTZ: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    chunk_BT: Tensor,
    bias_C: Tensor,
) -> Tensor:
    """As `attend_in_chunks`, where chunks begin anywhere. keys: key_BSZ, value_BSV and chunk_BS, whose first C columns
    are of tokens before these (with number -1 where they are of another chunk). A chunk that starts in one block of C
    tokens ends in the next, so a block of queries sees two blocks of keys."""
    key_BSZ, value_BSV, chunk_BS = keys
    tokens, size = query_BTZ.shape[1], len(bias_C)
    block = min(size, tokens)
    spare = -tokens % block
    query_BnQZ = F.pad(query_BTZ, (0, 0, 0, spare)).unflatten(1, (-1, block))
    chunk_BnQ1 = F.pad(chunk_BT, (0, spare), value=-2).unflatten(1, (-1, block)).unsqueeze(-1)

    def seen(x_BSF: Tensor) -> Tensor:
        return x_BSF.unfold(1, size + block, block).transpose(2, 3)

    back_QS = _back(block, size + block, query_BTZ.device)
    padded_BS = F.pad(chunk_BS, (0, spare), value=-1)
    same_BnQS = chunk_BnQ1 == padded_BS.unfold(1, size + block, block).unsqueeze(2)
    # A query behind the last token sees itself alone, so that its softmax is a number.
    visible_BnQS = (same_BnQS & (back_QS >= 0)) | (back_QS == 0)
    keys_BnSZ, values_BnSV = (seen(F.pad(each, (0, 0, 0, spare))) for each in (key_BSZ, value_BSV))
    mixed_BnQV = _attend(query_BnQZ, keys_BnSZ, values_BnSV, (bias_C, back_QS, visible_BnQS))
    return mixed_BnQV.flatten(1, 2)[:, :tokens]


def attend_in_ring(
    query_B1Z: Tensor, buffers: tuple[Tensor, Tensor, Tensor], position_B: Tensor, bias_C: Tensor
) -> Tensor:
    """[B, 1, V]: of one new token at a position of its document. buffers: key_BCZ, value_BCV and the distance of each
    slot, int64[C]; the token's own are in them."""
    key_BCZ, value_BCV, back_C = buffers
    visible_B1C = (back_C <= position_B.unsqueeze(1) % len(bias_C)).unsqueeze(1)
    return _attend(query_B1Z, key_BCZ, value_BCV, (bias_C, back_C.unsqueeze(0), visible_B1C))


def _attend(query: Tensor, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """places: bias by distance, distance of each pair [Q, S], and which of them count."""
    bias_C, back_QS, visible = places
    bias_QS = upcast(bias_C)[back_QS.clamp(0, len(bias_C) - 1)]
    scores = upcast(query @ key.mT) + bias_QS
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).to(value.dtype) @ value


def _back(queries: int, keys: int, device: torch.device) -> Tensor:
    """int64[Q, S]: distance of each key before each query, the last key and the last query being one token."""
    index_Q = torch.arange(keys - queries, keys, device=device)
    return index_Q.unsqueeze(1) - torch.arange(keys, device=device)
