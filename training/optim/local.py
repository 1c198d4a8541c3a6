"""Parameters and gradients as the plain tensors this process holds of them. Dispatching each small operation through
DTensor costs more than the operation, and every optimizer but Muon works element by element."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's piece, sharing memory with the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def stored_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A piece of optimizer state under the same cut as its parameter, sharing memory with the piece."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
