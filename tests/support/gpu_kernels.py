"""The kernels that the compiler writes for an H100, by kind of layer, on a machine without a GPU.

    python tests/support/gpu_kernels.py LIBRARY CASE...      LIBRARY: fake_cuda.cpp, compiled

Prints a JSON line for each case: {"case", "passes": [{"generated", "products"}, ...]}, the calls of generated kernels
and of library products in each compiled pass: the layers forward, then backward. The case "apart" is the dense one
without fusion, as a control. The case "liger" is a dense layer of liger-kernel's functions, with weights in bf16: its
launches of Triton kernels, other operators that write memory, and products (pip install --no-deps triton liger-kernel).

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
from collections import Counter
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
from torch.utils._python_dispatch import TorchDispatchMode

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
APART, LIGER = "apart", "liger"
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


WRITES_NOTHING = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "device", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts what a pass launches: {"generated", "others", "products"}; counts begin anew when they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name.removeprefix("prim::") not in WRITES_NOTHING:
            self.counts["products" if name == "mm" or "attention" in name else "others"] += 1
        return func(*args, **(kwargs or {}))

    def kernel(self, *arguments: Any, **named: Any) -> None:
        """In the place of a Triton kernel's launch."""
        self.counts["generated"] += 1

    def take(self) -> dict[str, int]:
        taken, self.counts = dict(self.counts), Counter()
        return taken


def passes_of_liger() -> list[dict[str, int]]:
    """Both passes of the layer of the case "dense", whose residual additions liger fuses with its norms."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as AddNorm  # an optional package
    from liger_kernel.ops.rope import LigerRopeFunction as Rope
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as SwiGLU
    from triton.runtime.jit import JITFunction

    width, heads, groups = MODEL["width"], MODEL["heads"], MODEL["kv_heads"]
    head, hidden = width // heads, 2 * width

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    with compiler_for_h100([]), mock.patch.object(torch.cuda, "device", lambda device: nullcontext()):
        launches = Launches()
        with mock.patch.object(JITFunction, "run", launches.kernel), FakeTensorMode(), launches:
            x, residual = (numbers(SAMPLES, TOKENS, width) for _ in range(2))
            angles = numbers(1, TOKENS, head).detach()
            first, second = numbers(width), numbers(width)
            joint, output = numbers((heads + 2 * groups) * head, width), numbers(width, width)
            gate, up, down = numbers(hidden, width), numbers(hidden, width), numbers(width, hidden)
            launches.take()
            normed, residual = AddNorm.apply(x, residual, first, 1e-5)
            streams = F.linear(normed, joint).unflatten(-1, (-1, head)).transpose(1, 2)
            query, key, value = streams.split([heads, groups, groups], dim=1)
            query, key = Rope.apply(query, key, angles, angles)
            mixed = fused_attention(query, key, value, is_causal=True, enable_gqa=True)
            mixed = F.linear(mixed.transpose(1, 2).flatten(2), output)
            normed, residual = AddNorm.apply(mixed, residual, second, 1e-5)
            y = F.linear(SwiGLU.apply(F.linear(normed, gate), F.linear(normed, up)), down)
            passes = [launches.take()]
            torch.autograd.backward([y, residual], [y.detach(), residual.detach()])
            return [*passes, launches.take()]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps({"case": name, "passes": passes_of_liger() if name == LIGER else passes_of(name)}), flush=True)
