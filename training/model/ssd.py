"""State-space duality (SSD, arXiv 2405.21060, section 6): Mamba-2's recurrence, computed in chunks by matmuls.

S_t = exp(dt_t A) S_t-1 + dt_t x_t B_t^T and y_t = S_t C_t, for each head. Within a chunk that is attention without a
softmax, whose weights decay; between chunks the state is passed on. docs/mixers.md works four tokens by hand."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# B rows, T tokens, H heads, P head width, G groups, R heads of a group, N state; c chunks of Q tokens each
# L, S: the tokens of a chunk, as those that read and those that are read


@dataclass(frozen=True)
class ScanInputs:
    """x_BTHP; dt_BTH: steps, positive; A_H: negative; B_BTGN and C_BTGN. documents_BT: int64, tokens of one document
    are neighbours, and the state is zero before its first; None: one document a row."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    A_H: Tensor
    B_BTGN: Tensor
    C_BTGN: Tensor
    documents_BT: Tensor | None = None


def ssd(inputs: ScanInputs, chunk: int, state_BHPN: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y_BTHP, the state after the last token). state_BHPN: of the tokens before, which belong to the document of the
    first token."""
    return ChunkedScan(inputs, chunk).run(state_BHPN)


class ChunkedScan:
    """The chunks, each computed as if no token were before it; `run` passes the state on from chunk to chunk."""

    def __init__(self, inputs: ScanInputs, chunk: int):
        self.inputs = inputs
        self.chunks = _Chunks(inputs, min(chunk, inputs.x_BTHP.shape[1]))
        self.within_BcQGRP, self.added_BcGRPN = self.chunks.within()
        self.kept_BcGR, self.read_BcQGR = self.chunks.carried()

    def run(self, state_BHPN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(y_BTHP, the state after the last token)."""
        tokens = self.inputs.x_BTHP.shape[1]
        state_BGRPN = self._first(state_BHPN)
        before = []
        for index in range(self.added_BcGRPN.shape[1]):
            before.append(state_BGRPN)
            state_BGRPN = self._next(state_BGRPN, index)
        from_state = torch.einsum("bcqgn,bcgrpn->bcqgrp", self.chunks.C_BcQGN, torch.stack(before, dim=1))
        y_BcQGRP = self.within_BcQGRP + from_state * self.read_BcQGR.unsqueeze(-1)
        return y_BcQGRP.flatten(1, 2)[:, :tokens].flatten(2, 3), state_BGRPN.flatten(1, 2)

    def summary(self) -> tuple[Tensor, Tensor]:
        """(kept_BHPN, added_BHPN): the state after the last token is kept x the state before the first + added. The
        last two dimensions of kept are 1."""
        state_BGRPN = self._first(None)
        for index in range(self.added_BcGRPN.shape[1]):
            state_BGRPN = self._next(state_BGRPN, index)
        return self.kept_BcGR.prod(dim=1).flatten(1)[..., None, None], state_BGRPN.flatten(1, 2)

    def _first(self, state_BHPN: Tensor | None) -> Tensor:
        rows, _, heads, head_width = self.inputs.x_BTHP.shape
        groups, size = self.inputs.B_BTGN.shape[2:]
        if state_BHPN is None:
            state_BHPN = self.inputs.x_BTHP.new_zeros(rows, heads, head_width, size)
        return state_BHPN.unflatten(1, (groups, -1))

    def _next(self, state_BGRPN: Tensor, index: int) -> Tensor:
        return state_BGRPN * self.kept_BcGR[:, index, ..., None, None] + self.added_BcGRPN[:, index]


class _Chunks:
    """The inputs in chunks; the last chunk is filled with tokens of step 0, which neither decay the state nor add."""

    def __init__(self, inputs: ScanInputs, size: int):
        groups = inputs.B_BTGN.shape[2]
        spare = -inputs.x_BTHP.shape[1] % size

        def chunks(values: Tensor) -> Tensor:
            padded = F.pad(values, (0, 0) * (values.dim() - 2) + (0, spare)) if spare else values
            return padded.unflatten(1, (-1, size))

        dt_BcQGR = chunks(inputs.dt_BTH).unflatten(-1, (groups, -1))
        self.B_BcQGN, self.C_BcQGN = chunks(inputs.B_BTGN), chunks(inputs.C_BTGN)
        self.added_BcQGRP = chunks(inputs.x_BTHP).unflatten(3, (groups, -1)) * dt_BcQGR.unsqueeze(-1)
        self.decay_BcQGR = (dt_BcQGR * inputs.A_H.unflatten(0, (groups, -1))).cumsum(dim=2)
        self.documents_BcQ = None
        if inputs.documents_BT is not None:
            last_B = inputs.documents_BT[:, -1:].expand(-1, spare)
            self.documents_BcQ = torch.cat([inputs.documents_BT, last_B], dim=1).unflatten(1, (-1, size))

    def within(self) -> tuple[Tensor, Tensor]:
        """(what tokens read of their own chunk, the state that each chunk adds)."""
        size, documents_BcQ = self.decay_BcQGR.shape[2], self.documents_BcQ
        decay_BcGRQ = self.decay_BcQGR.permute(0, 1, 3, 4, 2)
        seen = torch.ones(size, size, dtype=torch.bool, device=decay_BcGRQ.device).tril()
        if documents_BcQ is not None:
            seen = seen & (documents_BcQ.unsqueeze(-1) == documents_BcQ.unsqueeze(-2))[:, :, None, None]
        # Masked before exp: above the diagonal it would overflow, and its gradient would be no number.
        weights_BcGRLS = (decay_BcGRQ.unsqueeze(-1) - decay_BcGRQ.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
        scores_BcGLS = torch.einsum("bclgn,bcsgn->bcgls", self.C_BcQGN, self.B_BcQGN)
        weighted_BcGRLS = weights_BcGRLS * scores_BcGLS.unsqueeze(3)
        within = torch.einsum("bcgrls,bcsgrp->bclgrp", weighted_BcGRLS, self.added_BcQGRP)
        to_end_BcQGR = (self.decay_BcQGR[:, :, -1:] - self.decay_BcQGR).exp()
        if documents_BcQ is not None:
            to_end_BcQGR = to_end_BcQGR * _mask(documents_BcQ == documents_BcQ[:, :, -1:], to_end_BcQGR)
        states = torch.einsum("bcqgn,bcqgrp->bcgrpn", self.B_BcQGN, self.added_BcQGRP * to_end_BcQGR.unsqueeze(-1))
        return within, states

    def carried(self) -> tuple[Tensor, Tensor]:
        """(the share of the state before a chunk that is left after it, the share that each of its tokens reads)."""
        read_BcQGR = self.decay_BcQGR.exp()
        if self.documents_BcQ is not None:
            first_B1, last_Bc = self.documents_BcQ[:, :1, 0], self.documents_BcQ[:, :, -1]
            before_Bc = torch.cat([first_B1, last_Bc[:, :-1]], dim=1)
            read_BcQGR = read_BcQGR * _mask(self.documents_BcQ == before_Bc.unsqueeze(-1), read_BcQGR)
        return read_BcQGR[:, :, -1], read_BcQGR


def _mask(same_BcQ: Tensor, like: Tensor) -> Tensor:
    return same_BcQ[..., None, None].to(like.dtype)
