"""One training step on fake tensors of a CUDA device that is not there, for each path that only GPUs take.

    python tests/support/fake_cuda.py LIBRARY CASE...      LIBRARY: fake_cuda.cpp, compiled

Prints a JSON line for each case: {"case", "error": null or the first line}. A fake tensor has a device, dtype and shape
but no values: tensors of two devices, wrong dtypes and shapes raise, and so does all that would read a value."""

import ctypes
import json
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch looks for CUDA

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.gradients import Gradients
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model import fused, transformer
from gristmill.training.model.attention import ring
from gristmill.training.model.modules import rotary_angles
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.mesh import single_process

VOCAB, SAMPLES, TOKENS = 128, 2, 64
MODEL: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "sequence_length": TOKENS}
MAMBA2 = {"head_width": 16, "state": 16, "groups": 1, "chunk": 16}
TCNCA = {"kernel": 3, "dilation": 2, "blocks": 2, "chunk": 16, "shared": 16}
EXPERTS = {"experts": 4, "top_k": 2, "ffn_hidden_size": 32, "balance_loss": 0.1, "bias_update_rate": 1e-3}
LATENT = {"key_value_rank": 16, "query_rank": 8, "value_width": 16}
HOST = "angles on the host"
RING = "tiles of the ring"
# By name: what differs in the model, and in the training.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "fp32": ({}, {"precision": "fp32"}),
    "dropout": ({"dropout": 0.1}, {}),
    "documents": ({"window": (16, None)}, {}),
    "alibi": ({"positions": "alibi"}, {}),
    "softcap": ({"attention_softcap": 5.0, "logit_softcap": 5.0}, {}),
    "float8": ({}, {"float8": True}),
    "float8 experts": ({"moe": EXPERTS}, {"float8": True}),
    "muon": ({}, {"optimizer": {"name": "muon"}}),
    "experts": ({"moe": EXPERTS}, {}),
    "expert biases": ({"moe": EXPERTS, "biases": True, "mlp": "gelu"}, {}),
    "capacity": ({"moe": EXPERTS | {"capacity_factor": 1.0}}, {}),
    "mamba2": ({"mixer": "mamba2", "positions": "none", "mixers": {"mamba2": MAMBA2}}, {}),
    "hybrid experts": ({"pattern": "ME*E", "layers": 4, "mixers": {"mamba2": MAMBA2}, "moe": EXPERTS}, {}),
    "tcnca": ({"mixer": "tcnca", "positions": "none", "mixers": {"tcnca": TCNCA}}, {}),
    "latent": (
        {"mixer": "latent_attention", "head_width": 24, "rope_width": 8, "mixers": {"latent_attention": LATENT}},
        {},
    ),
    HOST: ({}, {}),  # must be refused
    RING: ({}, {}),
    "recomputed": ({}, {"layout": {"recompute": "full"}}),
    "recomputed operators": ({}, {"layout": {"recompute": "operators"}}),
}


def batch_of(documents: bool) -> dict[str, Tensor]:
    def numbers() -> Tensor:
        return torch.zeros(SAMPLES, TOKENS, dtype=torch.int64, device="cuda")

    batch = {"tokens": numbers(), "targets": numbers(), "weights": numbers().float()}
    batch["samples"] = torch.arange(SAMPLES, device="cuda")
    return batch | ({"documents": numbers(), "positions": numbers()} if documents else {})


def angles_on_host(*arguments: Any) -> tuple[Tensor, Tensor]:
    cosine, sine = rotary_angles(*arguments)
    return cosine.cpu(), sine.cpu()


def step(model: ModelConfig, train: TrainConfig, documents: bool) -> None:
    """Passes, gradient norm and update; nothing reads a value."""
    mesh = single_process("cuda")
    parts = build_local_model(model, VOCAB, train, mesh, seed=3)
    passes = GradientAccumulation(parts.stages[0], 1, causal_loss())
    optimizer = build_optimizer(parts.parameters, train, model, mesh)
    gradients = Gradients(parts, mesh)
    passes.train(batch_of(documents), torch.ones(1, dtype=torch.float64, device="cuda"))
    gradients.ready()
    gradients.square_sum()
    optimizer.step(1.0)
    gradients.clear()


def ring_tiles() -> None:
    """Forward and backward by the kernels of GPUs: flash without a mask and causally, in 16 bits, with fewer key/value
    heads; memory-efficient with a bias, in 32 bits and for heads of other widths."""
    for dtype in (torch.bfloat16, torch.float32):
        for width, value_width in ((64, 64), (24, 16)):
            query = torch.zeros(2, 4, 32, width, dtype=dtype, device="cuda")
            key, value = (torch.zeros(2, 2, 32, wide, dtype=dtype, device="cuda") for wide in (width, value_width))
            for mask in (None, ring.CAUSAL_MASK, torch.zeros(2, 1, 32, 32, device="cuda")):
                if mask is ring.CAUSAL_MASK and not ring.flash_serves(query, value):
                    continue
                scoring = ring.ScoreScale(0.1)
                mixed, log_sum = ring.attend_tile(query, key, value, mask, scoring)
                assert mixed.shape == (2, 4, 32, value_width) and log_sum.dtype == torch.float32
                tile = ring.TileResult(query, key, value, mixed, log_sum)
                gradients = ring.tile_gradients(tile, mixed.float(), mask, scoring)
                for gradient, stream in zip(gradients, (query, key, value), strict=True):
                    assert (gradient.shape, gradient.dtype) == (stream.shape, stream.dtype)


def error_of(case: str) -> str | None:
    shape, training = CASES[case]
    config = {"tokens": 2**14, "batch_tokens": SAMPLES * TOKENS, "precision": "bf16"}
    try:
        # Compiled kernels are replaced by what they compile: a compiler would look for the device.
        with (
            mock.patch.object(fused, "compiled", lambda function, tuned: function),
            mock.patch.object(ring, "_has_flash", lambda device: True),
            mock.patch.object(transformer, "rotary_angles", angles_on_host if case == HOST else rotary_angles),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            if case == RING:
                ring_tiles()
                return None
            step(ModelConfig(**(MODEL | shape)), TrainConfig(**(config | training)), case == "documents")
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return None


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        print(json.dumps({"case": name, "error": error_of(name)}), flush=True)
