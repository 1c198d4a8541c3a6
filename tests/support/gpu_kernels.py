"""The kernels that the compiler writes for an H100, by kind of layer, on a machine without a GPU.

    python tests/support/gpu_kernels.py LIBRARY CASE...      LIBRARY: fake_cuda.cpp, compiled

Prints a JSON line for each case: {"case", "passes": [{"generated", "products"}, ...]}, the calls of generated kernels
and of library products in each compiled pass: the layers forward, then backward. The case "apart" is the dense one
without fusion, as a control.

The step runs on fake tensors (fake_cuda.py). The compiler is inductor as it is, but that an H100's properties stand
here, that its code is read and not loaded, and that the graph runs in its place. It needs no Triton, which would
compile that code."""

import ctypes
import json
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before torch looks for CUDA

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.model import fused
from tests.support.fake_cuda import CASES, MODEL, SAMPLES, TOKENS, step

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block_optin=227 << 10,
    gcnArchName="",  # of AMD
)
APART = "apart"
GENERATED = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)
PRODUCTS = re.compile(
    r"^\s+(?:extern_kernels\.\w+|\w+ = torch\.ops\.aten\.\w*(?:attention|mm)\w*\.\w+)\(", re.MULTILINE
)


class GeneratedCode(BaseException):
    """The code of one pass, in the place of its module."""


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention by the kernel that torch takes on an H100; for a device without values it takes
    none."""
    if enable_gqa:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    if attn_mask is None:
        mixed, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        mixed, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, scale=scale
        )
    return mixed


def code_of(graph: GraphLowering) -> None:
    raise GeneratedCode(graph.codegen()[0].value)


def read_code(codes: list[str], graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a pass, notes its code, and returns the graph to run."""
    eager = copy.deepcopy(graph)
    try:
        compile_fx.compile_fx_inner(graph, inputs, **options)
    except GeneratedCode as code:
        codes.append(str(code))

    def run(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        modes = (value.fake_mode for value in values if isinstance(value, Tensor) and hasattr(value, "fake_mode"))
        with next(modes, nullcontext()):
            return eager(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def compiler_for_h100(codes: list[str]) -> Iterator[None]:
    """torch.compile writes code for an H100 into codes."""

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=partial(read_code, codes))

    compile_function = torch.compile
    answers = {
        (torch, "compile"): partial(compile_function, backend=backend),
        (F, "scaled_dot_product_attention"): fused_attention,
        (torch.cuda, "get_device_properties"): lambda device=None: H100,
        (torch.cuda, "get_device_capability"): lambda device=None: (9, 0),
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "is_bf16_supported"): lambda including_emulation=True: True,
        (CudaInterface, "get_device_properties"): staticmethod(lambda device=None: H100),
        (CudaInterface, "get_compute_capability"): staticmethod(lambda device=None: 90),
        (CudaInterface, "is_bf16_supported"): staticmethod(lambda including_emulation=True: True),
        (GraphLowering, "compile_to_module"): code_of,
    }
    with ExitStack() as stack:
        for (owner, name), answer in answers.items():
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", lambda: True))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: "none"))
        stack.enter_context(mock.patch.object(fused, "compiled", lambda function, tuned: function))
        # Folding computes constants on the device.
        stack.enter_context(config.patch(joint_graph_constant_folding=False, force_disable_caches=True))
        stack.enter_context(config.patch(compile_threads=1))
        yield


def passes_of(case: str) -> list[dict[str, int]]:
    shape, training = CASES["dense" if case == APART else case]
    settings = {"tokens": 2**14, "batch_tokens": SAMPLES * TOKENS, "precision": "bf16", "compile": True}
    codes: list[str] = []
    fusion = config.patch(max_fusion_size=1) if case == APART else nullcontext()
    with compiler_for_h100(codes), fusion, FakeTensorMode(allow_non_fake_inputs=True):
        step(ModelConfig(**(MODEL | shape)), TrainConfig(**(settings | training)), case == "documents")
    return [{"generated": len(GENERATED.findall(code)), "products": len(PRODUCTS.findall(code))} for code in codes]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps({"case": name, "passes": passes_of(name)}), flush=True)
