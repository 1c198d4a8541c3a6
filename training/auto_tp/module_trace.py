"""Execution order of a model's linear layers, and which of them feeds which, from one run without numbers.

The model runs on the meta device. Every tensor that comes out of a linear layer carries the name of that layer through
all further operations, until the next linear layer takes it in."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Attributes that traced tensors carry: the names of linear layers; and the columns (layer, first, end) of a layer's
# output that the last dimension holds.
ORIGINS = "_auto_tp_origins"
COLUMNS = "_auto_tp_columns"
HEADS = "_auto_tp_heads"  # (layer, dimension from the end, number)

VIEWS = ("view", "reshape", "unflatten")
CUTS = ("split", "chunk", "split_with_sizes", "tensor_split")


@dataclass
class LinearCall:
    """The first call of a linear layer. origins: the linear layers whose outputs its input depends on without another
    linear layer in between. input_id: equal for layers with the same input. pieces: widths that the output is cut into
    right away; empty: it is used as a whole. heads: by (first, end) of the columns that are viewed as [..., heads, head
    width]. is_result: the model returns it."""

    name: str
    inputs: int
    outputs: int
    origins: frozenset[str]
    input_id: int
    num_tokens: int
    heads: dict[tuple[int, int], int] = field(default_factory=dict)
    pieces: tuple[int, ...] = ()
    slices: set[tuple[int, int]] = field(default_factory=set)
    used_whole: bool = False
    is_result: bool = False


@dataclass
class ExpertsCall:
    """The first call of a module of experts. width: of its inputs. ffn_hidden_size: of one expert. top_k: experts a
    token."""

    ffn_hidden_size: int
    width: int = 0
    top_k: int = 0


@dataclass
class Trace:
    """calls: in execution order. experts: modules of experts that transformers shards by their features, by name.
    embeddings: modules that look ids up, by name, and their widths. opaque: for a linear layer, an operation on its
    output whose result cannot be sharded by rules. parameters: those of other modules that meet the outputs of linear
    layers, by name, with the names of these layers. sizes: of all parameters, by name. unplanned: modules with matrices
    of their own that are none of these, such as routers."""

    calls: dict[str, LinearCall] = field(default_factory=dict)
    experts: dict[str, ExpertsCall] = field(default_factory=dict)
    embeddings: dict[str, int] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, frozenset[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    unplanned: list[str] = field(default_factory=list)


def trace(model: nn.Module, inputs: Mapping[str, Tensor]) -> Trace:
    """Runs the model, which lies on the meta device, on inputs there."""
    traced = Trace(sizes={name: parameter.numel() for name, parameter in model.named_parameters()})
    recorder = _Recorder(traced, {id(parameter): name for name, parameter in model.named_parameters()})
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if is_linear(module):
                stack.enter_context(_removed(module.register_forward_pre_hook(recorder.entering(name, module))))
                stack.enter_context(_removed(module.register_forward_hook(recorder.leaving(name))))
            elif isinstance(module, nn.Embedding):
                stack.enter_context(_removed(module.register_forward_pre_hook(recorder.looking_up(name, module))))
            elif _has_known_experts(model, name, module):
                traced.experts[name] = ExpertsCall(module.get_parameter("down_proj").shape[2])
                stack.enter_context(_removed(module.register_forward_pre_hook(_routing_to(traced.experts[name]))))
            elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                traced.unplanned.append(name)
        stack.enter_context(_NumbersOfMeta())
        stack.enter_context(recorder)
        output = model(**inputs)
    for leaf in tree_leaves(dict(output)):
        for name in getattr(leaf, ORIGINS, ()):
            traced.calls[name].is_result = True
    for call in traced.calls.values():
        call.pieces = _pieces(call)
    return traced


EXPERT_MATRICES = {"gate_up_proj", "down_proj"}


def _has_known_experts(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether the module is what transformers' own plan shards by the features of each expert: gate and up matrices
    [E, 2 F, D] in one, down matrices [E, D, F], and nothing else."""
    if {leaf for leaf, _ in module.named_parameters()} != EXPERT_MATRICES:
        return False
    own_plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
    styles = {
        leaf: next((style for key, style in own_plan.items() if f"{generic}.{leaf}".endswith(f".{key}")), None)
        for leaf in EXPERT_MATRICES
    }
    gate_up, down = (module.get_parameter(leaf).shape for leaf in ("gate_up_proj", "down_proj"))
    fits = len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])
    return fits and styles == {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


def _routing_to(call: ExpertsCall) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        call.width, call.top_k = args[0].shape[-1], args[1].shape[-1]

    return hook


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or GPT-2's Conv1D, which is one with a transposed weight."""
    return isinstance(module, nn.Linear) or is_transposed(module)


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


class _NumbersOfMeta(TorchDispatchMode):
    """Answers 0 where the model asks for a number of a meta tensor, such as whether a mask is full."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    """Carries origins from the arguments of each operation to its results."""

    def __init__(self, trace: Trace, parameters: Mapping[int, str]):
        super().__init__()
        self.trace, self.parameters, self.inside = trace, parameters, 0
        self.kept: list[Any] = []  # inputs, so that no id is used twice

    def entering(self, name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.inside += 1
            if name in self.trace.calls:
                return
            x = args[0]
            self.kept.append(x)
            weight = module.get_parameter("weight")
            inputs, outputs = weight.shape if is_transposed(module) else reversed(weight.shape)
            origins = frozenset(getattr(x, ORIGINS, ()))
            self.trace.calls[name] = LinearCall(name, inputs, outputs, origins, id(x), x.numel() // x.shape[-1])

        return hook

    def leaving(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            self.inside -= 1
            setattr(output, ORIGINS, frozenset({name}))
            setattr(output, COLUMNS, (name, 0, output.shape[-1]))

        return hook

    def looking_up(self, name: str, module: nn.Embedding) -> Any:
        return lambda *_: self.trace.embeddings.setdefault(name, module.embedding_dim) and None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origins = frozenset().union(*(getattr(tensor, ORIGINS, frozenset()) for tensor in tensors))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not origins or not results:
            return result
        name = getattr(func, "__name__", str(func))
        if not is_transparent(name):
            for origin in origins:
                self.trace.opaque.setdefault(origin, name)
        for tensor in tensors:
            if (parameter := self.parameters.get(id(tensor))) is not None:
                self.trace.parameters[parameter] = self.trace.parameters.get(parameter, frozenset()) | origins
        if (layer := _cuts_heads(name, args, results)) is not None:
            self.trace.opaque.setdefault(layer, "a cut between heads")
        self._note_use(name, args, kwargs or {}, results)
        for tensor in results:
            setattr(tensor, ORIGINS, origins)
        return result

    def _note_use(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: list[Tensor]) -> None:
        """Records how the output of a linear layer is cut, and into how many heads it is viewed."""
        used = [tensor for tensor in tree_leaves((args, kwargs)) if hasattr(tensor, COLUMNS)]
        for tensor in used:
            layer, first, end = getattr(tensor, COLUMNS)
            call, whole = self.trace.calls[layer], end - first == self.trace.calls[layer].outputs
            cuts = _cuts(name, args, end - first, results) if tensor is args[0] else []
            shape = tuple(results[0].shape)
            if name in VIEWS and tensor is args[0] and (heads := _heads(shape, end - first)):
                call.heads[first, end] = heads
                setattr(results[0], HEADS, (layer, -_dims_of(shape, end - first), heads))
            if whole and name == "unsqueeze" and results[0].shape[-1] == end - first:
                setattr(results[0], COLUMNS, (layer, first, end))  # cut thereafter, as by GPTBigCode
                continue
            if whole and cuts:
                call.slices |= set(cuts)
                for result, (begin, stop) in zip(results, cuts, strict=True):
                    setattr(result, COLUMNS, (layer, begin, stop))
                continue
            call.used_whole |= whole
            if results[0].shape[-1:] == (end - first,) and name not in VIEWS:
                setattr(results[0], COLUMNS, (layer, first, end))  # element by element, as before a view by heads


def _cuts_heads(name: str, args: tuple[Any, ...], results: list[Tensor]) -> str | None:
    """The linear layer whose heads the operation takes apart, as Falcon does with one key/value head."""
    layer, dim, number = getattr(args[0], HEADS, ("", 0, 0)) if args else ("", 0, 0)
    if name != "__getitem__" or not layer or results[0].ndim != args[0].ndim or results[0].shape[dim] == number:
        return None
    return str(layer)


def _cuts(name: str, args: tuple[Any, ...], width: int, results: list[Tensor]) -> list[tuple[int, int]]:
    """The columns of each result, where the operation cuts the last dimension."""
    widths = [result.shape[-1] if result.ndim else 1 for result in results]
    if name in CUTS and sum(widths) == width:
        ends = [sum(widths[: index + 1]) for index in range(len(widths))]
        return list(zip([0, *ends], ends, strict=False))
    bounds = _last_slice(args[1], width) if name == "__getitem__" else None
    return [bounds] if bounds is not None else []


def _heads(shape: tuple[int, ...], width: int) -> int:
    """[B, T, 4, 8] of width 32 -> 4; [B, T, 2, 3, 8] of width 48 -> 2; 0 where the width is not cut up."""
    dims = _dims_of(shape, width)
    return shape[-dims] if dims > 1 else 0


def _dims_of(shape: tuple[int, ...], width: int) -> int:
    """The number of last dimensions that make up the width; 0 if none do."""
    product = 1
    for number, size in enumerate(reversed(shape), start=1):
        product *= size
        if product == width:
            return number
    return 0


def _last_slice(index: Any, width: int) -> tuple[int, int] | None:
    """(begin, end) where only the last dimension is sliced: x[..., a:b]."""
    if not (isinstance(index, tuple) and index and index[0] is Ellipsis and len(index) == 2):
        return None
    last = index[1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    begin, end, _ = last.indices(width)
    return begin, end


def _pieces(call: LinearCall) -> tuple[int, ...]:
    """The widths of the slices, where they follow each other and no other use is made of the output."""
    slices = sorted(call.slices)
    joined = [0, *(end for _, end in slices)] == [*(begin for begin, _ in slices), call.outputs]
    return tuple(end - begin for begin, end in slices) if slices and joined and not call.used_whole else ()


# Operations whose sharding DTensor knows, between a layer sharded by outputs and one sharded by inputs.

ELEMENTWISE = (
    "add sub mul div neg pow exp log sqrt rsqrt sigmoid silu gelu relu relu_ leaky_relu tanh softplus mish hardtanh "
    "square dropout to type type_as float half bfloat16 double contiguous clone detach where masked_fill clamp clip "
    "clamp_ minimum maximum __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __imul__ __truediv__ __pow__ "
    "__neg__ abs erf cos sin quick_gelu"
)
VIEW_OPERATORS = (
    "view reshape transpose permute unsqueeze squeeze expand flatten unflatten chunk split split_with_sizes "
    "__getitem__ cat stack repeat_interleave expand_as view_as T mT movedim swapaxes"
)
PRODUCTS = "matmul __matmul__ bmm baddbmm softmax scaled_dot_product_attention einsum"
NORMS = "mean var sum layer_norm rms_norm norm"

TRANSPARENT = frozenset(" ".join((ELEMENTWISE, VIEW_OPERATORS, PRODUCTS, NORMS)).split())


def is_transparent(name: str) -> bool:
    """Whether the operation's result is sharded as its argument is."""
    return name in TRANSPARENT


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is [inputs, outputs]. transformers is an extra,
    so it is known by its name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")
