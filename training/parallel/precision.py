"""Mixed precision: the dtypes of stored parameters, of the computation and of gradient reduction."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    store: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float32),
}
