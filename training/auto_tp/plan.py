"""A tensor-parallel plan by rules, for a model whose code we do not know (Redco, arXiv 2310.16355, section 3).

Linear layers alternate in execution order: one whose input is whole is sharded by outputs, the next one that takes its
result in by inputs. Attention is sharded by heads, so that a layer's columns are cut between heads. Token embedding and
output layer are sharded by the vocabulary. What an input-sharded layer or an embedding returns is whole on every rank.
What the rules cannot shard is replicated, with a reason."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.training.auto_tp.module_trace import LinearCall, Trace

NO_LINEAR = "its matrices are not those of a linear layer"
ALIGNED_FEATURES = 8  # of 2 bytes: torch's grouped products read rows of multiples of 16 bytes
FEW_HEADS = "key/value heads do not split over {degree} ranks"


class LayerRole(Enum):
    OUTPUT = "output"  # sharded by outputs; its result stays sharded
    INPUT = "input"  # sharded by inputs; its result is summed over the ranks
    VOCABULARY = "vocabulary"  # an embedding by rows, or the output layer by outputs
    EXPERTS = "experts"  # each expert by its features; their result is summed over the ranks
    REPLICATED = "replicated"


@dataclass(frozen=True)
class LayerPlan:
    """role of a linear layer or an embedding. pieces: the widths a fused layer is split into, and for each whether it
    is sharded. reason: why it is replicated; under_sharded_heads: it makes keys or values of query heads that are
    sharded. shares_input: the first layer with the same input, whose gradient is summed once for all of them.
    has_experts: it is a module of experts."""

    name: str
    role: LayerRole
    pieces: tuple[int, ...] = ()
    sharded_pieces: tuple[bool, ...] = ()
    reason: str = ""
    shares_input: str = ""
    under_sharded_heads: bool = False
    has_experts: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """layers: by name, in execution order, embeddings first."""

    degree: int
    layers: Mapping[str, LayerPlan]

    def having(self, role: LayerRole) -> list[LayerPlan]:
        return [layer for layer in self.layers.values() if layer.role is role]


@dataclass(frozen=True)
class Tables:
    """The vocabulary's tables: vocab_size rows each. tied: linear layers whose weight is one of them."""

    vocab_size: int
    names: frozenset[str]
    tied: frozenset[str]


def plan_tensor_parallel(traced: Trace, tables: Tables, degree: int) -> TensorPlan:
    """The plan for so many tensor ranks."""
    layers = {layer.name: layer for layer in _embeddings(traced, tables, degree)}
    outputs, inputs, blocks = _alternate(traced, tables)
    heads = {name for name, call in traced.calls.items() if _is_output_layer(call, tables)}
    taken = frozenset().union(*inputs.values())
    reasons = {
        name: f"{blocks[name]}, sharded by the vocabulary, needs its result whole"
        if name in blocks
        else "no linear layer takes its result in"
        for name in outputs - taken
    }
    for component in _components(inputs):
        reasons |= _component_reasons([traced.calls[name] for name in component], traced, blocks, inputs, degree)
    first_by_input: dict[int, str] = {}
    for name, call in traced.calls.items():
        if name in heads:
            layers[name] = _output_layer(call, tables, degree)
        elif name in inputs and name not in reasons:
            layers[name] = LayerPlan(name, LayerRole.INPUT)
        elif name in outputs and name not in reasons:
            pieces = tuple(_piece_splits(call, bounds, degree) for bounds in _bounds(call))
            first = first_by_input.setdefault(call.input_id, name)
            layers[name] = LayerPlan(name, LayerRole.OUTPUT, call.pieces, pieces, "", "" if first == name else first)
        else:
            few = reasons[name].endswith(FEW_HEADS.format(degree=degree))
            whole = (False,) * len(call.pieces)
            layers[name] = LayerPlan(
                name, LayerRole.REPLICATED, call.pieces, whole, reasons[name], under_sharded_heads=few
            )
    layers |= {name: _experts(name, call.ffn_hidden_size, degree) for name, call in traced.experts.items()}
    unplanned = {name: LayerPlan(name, LayerRole.REPLICATED, reason=NO_LINEAR) for name in traced.unplanned}
    return TensorPlan(degree, layers | unplanned)


def _embeddings(traced: Trace, tables: Tables, degree: int) -> Iterator[LayerPlan]:
    for name in traced.embeddings:
        if name not in tables.names:
            yield LayerPlan(name, LayerRole.REPLICATED, reason="not a table of the vocabulary")
        elif tables.vocab_size % degree:
            yield LayerPlan(name, LayerRole.REPLICATED, reason=_vocabulary_problem(tables, degree))
        else:
            yield LayerPlan(name, LayerRole.VOCABULARY)


def _output_layer(call: LinearCall, tables: Tables, degree: int) -> LayerPlan:
    if tables.vocab_size % degree:
        return LayerPlan(call.name, LayerRole.REPLICATED, reason=_vocabulary_problem(tables, degree))
    return LayerPlan(call.name, LayerRole.VOCABULARY)


def _experts(name: str, ffn_hidden_size: int, degree: int) -> LayerPlan:
    if ffn_hidden_size % (degree * ALIGNED_FEATURES) == 0:
        return LayerPlan(name, LayerRole.EXPERTS, has_experts=True)
    problem = f"{ffn_hidden_size} features of an expert do not split over {degree} ranks in multiples of 8"
    return LayerPlan(name, LayerRole.REPLICATED, reason=problem, has_experts=True)


def _vocabulary_problem(tables: Tables, degree: int) -> str:
    return f"a vocabulary of {tables.vocab_size} does not split over {degree} ranks"


def _is_output_layer(call: LinearCall, tables: Tables) -> bool:
    return call.outputs == tables.vocab_size and (call.name in tables.tied or call.is_result)


def _alternate(traced: Trace, tables: Tables) -> tuple[set[str], dict[str, frozenset[str]], dict[str, str]]:
    """(layers sharded by outputs; those by inputs, with the former that they take in; output-sharded layers that a
    vocabulary layer takes in, which needs them whole)."""
    outputs: set[str] = set()
    inputs: dict[str, frozenset[str]] = {}
    blocks: dict[str, str] = {}
    for name, call in traced.calls.items():
        sources = call.origins & outputs
        if _is_output_layer(call, tables):
            blocks |= dict.fromkeys(sources, name)
        elif sources:
            inputs[name] = sources
        else:
            outputs.add(name)
    return outputs, inputs, blocks


def _components(inputs: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Layers that depend on each other's sharding: q, k, v and the output projection are one component."""
    components: list[set[str]] = []
    for name, sources in inputs.items():
        joined = {name, *sources}
        apart = []
        for component in components:
            if component & joined:
                joined |= component
            else:
                apart.append(component)
        components = [*apart, joined]
    return [sorted(component) for component in components]


def _component_reasons(
    calls: list[LinearCall], traced: Trace, blocks: Mapping[str, str], inputs: Iterable[str], degree: int
) -> dict[str, str]:
    """Why layers of a component are replicated; empty where all are sharded."""
    outputs = [call for call in calls if call.name not in inputs]
    problem = next(_problems(calls, outputs, traced, blocks, set(inputs), degree), None)
    if problem is not None:
        return {call.name: problem for call in calls}
    # Key/value heads may be too few, and are then replicated under query heads that are sharded.
    few = [call for call in outputs if not any(_piece_splits(call, bounds, degree) for bounds in _bounds(call))]
    return {
        call.name: f"{max(call.heads.values(), default=call.outputs)} {FEW_HEADS.format(degree=degree)}" for call in few
    }


def _problems(
    calls: list[LinearCall],
    outputs: list[LinearCall],
    traced: Trace,
    blocks: Mapping[str, str],
    inputs: set[str],
    degree: int,
) -> Iterator[str]:
    for call in outputs:
        if call.name in traced.opaque:
            yield f"{traced.opaque[call.name]} follows {call.name}, which no rule can shard"
        if call.name in blocks:
            yield f"{blocks[call.name]}, sharded by the vocabulary, needs its result whole"
        if call.is_result:
            yield f"the model returns the result of {call.name}"
    heads = max((number for call in outputs for number in call.heads.values()), default=0)
    if heads % degree:
        yield f"{heads} heads do not split over {degree} ranks"
    for call in calls:
        if call.name in inputs and call.inputs % degree:
            yield f"{call.inputs} inputs of {call.name} do not split over {degree} ranks"
    for call in outputs:
        for bounds in _bounds(call):
            if not _piece_splits(call, bounds, degree) and not 0 < _heads_of(call, bounds) < heads:
                yield f"{bounds[1] - bounds[0]} outputs of {call.name} do not split over {degree} ranks"


def _bounds(call: LinearCall) -> list[tuple[int, int]]:
    """(first, end) of each piece."""
    ends = [sum(call.pieces[: index + 1]) for index in range(len(call.pieces))]
    return list(zip([0, *ends], ends, strict=False)) or [(0, call.outputs)]


def _piece_splits(call: LinearCall, bounds: tuple[int, int], degree: int) -> bool:
    return (_heads_of(call, bounds) or bounds[1] - bounds[0]) % degree == 0


def _heads_of(call: LinearCall, bounds: tuple[int, int]) -> int:
    """The heads of a piece; of one that is never viewed by heads beside pieces that are, as the only key of
    GPTBigCode, those that fit into its width."""
    if bounds in call.heads or not call.heads:
        return call.heads.get(bounds, 0)
    head_width = min((end - first) // number for (first, end), number in call.heads.items())
    width = bounds[1] - bounds[0]
    return width // head_width if width % head_width == 0 else 0


# The collectives of a tensor-parallel plan, counted from the plan or in a running step, and the plan as text.


@dataclass(frozen=True)
class Collective:
    """One exchange in each forward or backward pass. values: numbers a token, or in all where it is of a parameter."""

    name: str
    layer: str
    is_forward: bool
    values: int
    per_token: bool = True


def collectives(plan: TensorPlan, traced: Trace) -> Iterator[Collective]:
    """Those of the model's layers in one forward and backward pass, without the loss.

    An all-reduce forward behind each vocabulary embedding, each layer sharded by inputs and each module of experts; one
    backward for each input of layers sharded by outputs and of experts, for the experts' weights, and for a parameter
    that meets sharded tensors, such as a norm of heads; an all-gather backward behind each replicated key or value
    layer."""
    sharded = {layer.name for layer in plan.having(LayerRole.OUTPUT)}
    for name, layer in plan.layers.items():
        call = traced.calls.get(name)
        if layer.role is LayerRole.EXPERTS:
            experts = traced.experts[name]
            yield Collective("all_reduce", name, True, experts.width)
            yield Collective("all_reduce", name, False, experts.width)
            yield Collective("all_reduce", name, False, experts.top_k)
        elif call is None:
            if layer.role is LayerRole.VOCABULARY:
                yield Collective("all_reduce", name, True, traced.embeddings[name])
        elif layer.role is LayerRole.INPUT:
            yield Collective("all_reduce", name, True, call.outputs)
        elif layer.role is LayerRole.VOCABULARY or (layer.role is LayerRole.OUTPUT and not layer.shares_input):
            yield Collective("all_reduce", name, False, call.inputs)
        elif layer.role is LayerRole.REPLICATED and layer.under_sharded_heads:
            yield Collective("all_gather", name, False, call.outputs)
    for name, sources in traced.parameters.items():
        if sources & sharded:
            yield Collective("all_reduce", name, False, traced.sizes[name], per_token=False)


def hand_plan_collectives(plan: TensorPlan, traced: Trace) -> int:
    """Collectives of a step under Megatron's rules for the same layers (arXiv 1909.08053, section 3): two forward and
    two backward a layer, one for the embedding and one for the output layer's input."""
    return sum(collective.per_token and collective.name == "all_reduce" for collective in collectives(plan, traced))


def described(plan: TensorPlan, traced: Trace, bytes_per_value: int) -> Iterator[str]:
    """The plan in lines: sharded layers by role, replicated ones by reason, and what is exchanged for each token."""
    yield f"tensor parallelism over {plan.degree} ranks, by rules:"
    for role in LayerRole:
        groups: Counter[tuple[str, str]] = Counter(
            (pattern(layer.name), pattern(layer.reason)) for layer in plan.having(role)
        )
        for (name, reason), number in groups.items():
            yield f"  {role.value:<10}  {name}{f' ({number})' if number > 1 else ''}{f': {reason}' if reason else ''}"
    calls = list(collectives(plan, traced))
    tokens = sum(call.values for call in calls if call.per_token) * bytes_per_value
    once = sum(call.values for call in calls if not call.per_token) * bytes_per_value
    forward = sum(call.is_forward for call in calls)
    yield (
        f"  {forward} collectives forward and {len(calls) - forward} backward, {tokens:,} bytes a token"
        f"{f' and {once:,} bytes of gradients' if once else ''}"
    )
    for (name, layer), number in Counter(
        (call.name, pattern(call.layer)) for call in calls if call.name != "all_reduce" or not call.per_token
    ).items():
        why = "a gradient summed over sharded heads" if name == "all_reduce" else "gradients of replicated heads"
        yield f"  more than Megatron's plan: {number} {name} for {layer}, {why}"


def pattern(text: str) -> str:
    """model.layers.3.mlp.up -> model.layers.*.mlp.up."""
    return " ".join(
        ".".join("*" if part.isdigit() else part for part in word.split(".")) if "." in word else word
        for word in text.split(" ")
    )


NO_EXCHANGE = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run while it is active, and the bytes of their results on this rank.

    torch's CommDebugMode fails on models whose modules are used twice, such as T5's embedding (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # the collectives that the operation runs come here themselves
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace.startswith(("c10d", "_c10d_functional", "_dtensor")) and name not in NO_EXCHANGE:
            self.counts[name.rstrip("_")] += 1
            self.num_bytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    @property
    def total(self) -> int:
        return sum(self.counts.values())
