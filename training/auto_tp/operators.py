"""Operations whose sharding DTensor knows, between a layer sharded by outputs and one sharded by inputs."""

from torch import nn

ELEMENTWISE = (
    "add sub mul div neg pow exp log sqrt rsqrt sigmoid silu gelu relu relu_ leaky_relu tanh softplus mish hardtanh "
    "square dropout to type type_as float half bfloat16 double contiguous clone detach where masked_fill clamp clip "
    "clamp_ minimum maximum __add__ __radd__ __iadd__ __sub__ __rsub__ __mul__ __rmul__ __imul__ __truediv__ __pow__ "
    "__neg__ abs erf cos sin quick_gelu"
)
VIEWS = (
    "view reshape transpose permute unsqueeze squeeze expand flatten unflatten chunk split split_with_sizes "
    "__getitem__ cat stack repeat_interleave expand_as view_as T mT movedim swapaxes"
)
PRODUCTS = "matmul __matmul__ bmm baddbmm softmax scaled_dot_product_attention einsum"
NORMS = "mean var sum layer_norm rms_norm norm"

TRANSPARENT = frozenset(" ".join((ELEMENTWISE, VIEWS, PRODUCTS, NORMS)).split())


def is_transparent(name: str) -> bool:
    """Whether the operation's result is sharded as its argument is."""
    return name in TRANSPARENT


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D: a linear layer whose weight is [inputs, outputs]. transformers is an extra,
    so it is known by its name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")
