"""The collectives of a tensor-parallel plan, counted from the plan or in a running step, and the plan as text."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.training.auto_tp.plan import Role, TensorPlan
from gristmill.training.auto_tp.trace import Trace


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

    An all-reduce forward behind each vocabulary embedding and each layer sharded by inputs; one backward for each input
    of layers sharded by outputs, and one for a parameter that meets sharded tensors, such as a norm of heads; an
    all-gather backward behind each replicated key or value layer."""
    sharded = {layer.name for layer in plan.having(Role.OUTPUT)}
    for name, layer in plan.layers.items():
        call = traced.calls.get(name)
        if call is None:
            if layer.role is Role.VOCABULARY:
                yield Collective("all_reduce", name, True, traced.embeddings[name])
        elif layer.role is Role.INPUT:
            yield Collective("all_reduce", name, True, call.outputs)
        elif layer.role is Role.VOCABULARY or (layer.role is Role.OUTPUT and not layer.shares_input):
            yield Collective("all_reduce", name, False, call.inputs)
        elif layer.role is Role.REPLICATED and layer.under_sharded_heads:
            yield Collective("all_gather", name, False, call.outputs)
    for name, sources in traced.parameters.items():
        if sources & sharded:
            yield Collective("all_reduce", name, False, traced.sizes[name], per_token=False)


def hand_plan_collectives(plan: TensorPlan, traced: Trace) -> int:
    """Collectives of a step under Megatron's rules for the same layers (arXiv 1909.08053, section 3): two forward and
    two backward a layer, one for the embedding and one for the output layer's input."""
    return sum(each.per_token and each.name == "all_reduce" for each in collectives(plan, traced))


def described(plan: TensorPlan, traced: Trace, bytes_per_value: int) -> Iterator[str]:
    """The plan in lines: sharded layers by role, replicated ones by reason, and what is exchanged for each token."""
    yield f"tensor parallelism over {plan.degree} ranks, by rules:"
    for role in Role:
        groups: Counter[tuple[str, str]] = Counter(
            (pattern(layer.name), pattern(layer.reason)) for layer in plan.having(role)
        )
        for (name, reason), number in groups.items():
            yield f"  {role.value:<10}  {name}{f' ({number})' if number > 1 else ''}{f': {reason}' if reason else ''}"
    found = list(collectives(plan, traced))
    tokens = sum(each.values for each in found if each.per_token) * bytes_per_value
    once = sum(each.values for each in found if not each.per_token) * bytes_per_value
    forward = sum(each.is_forward for each in found)
    yield (
        f"  {forward} collectives forward and {len(found) - forward} backward, {tokens:,} bytes a token"
        f"{f' and {once:,} bytes of gradients' if once else ''}"
    )
    for (name, layer), number in Counter(
        (each.name, pattern(each.layer)) for each in found if each.name != "all_reduce" or not each.per_token
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
        if any(issubclass(each, DTensor) for each in types):
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
