from pathlib import Path

p = Path("training/mixer.py")
s = p.read_text()
s = s.replace(
    '''def norm_bytes(vectors: float, width: int, compute: int, statistics: int, rmsnorm: bool) -> float:
    """What autograd keeps of a norm: LayerNorm its input in fp32 and two statistics a vector, our RMSNorm its input as
    it is and one."""
    if rmsnorm:
        return vectors * (width * compute + statistics)
    return vectors * (width + 2) * statistics
''',
    '''def norm_bytes(vectors: float, width: int, share: Any, rmsnorm: bool) -> float:
    """What autograd keeps of a norm: LayerNorm its input (in fp32 on GPUs) and two statistics a vector, our RMSNorm its
    input as it is and one. share: with the bytes of compute and statistics, and cuda."""
    if rmsnorm:
        return float(vectors * (width * share.compute + share.statistics))
    return float(vectors * (width * (share.statistics if share.cuda else share.compute) + 2 * share.statistics))
''',
)
p.write_text(s)
p = Path("training/mixers/attention.py")
s = p.read_text()
s = s.replace(
    "norm_bytes(vectors, self.head_dim, share.compute, share.statistics, self.rmsnorm)",
    "norm_bytes(vectors, self.head_dim, share, self.rmsnorm)",
)
p.write_text(s)
p = Path("training/planner/activations.py")
s = p.read_text()
s = s.replace(
    'norm_bytes(tokens, width, sizes.compute, sizes.statistics, norm == "rmsnorm")',
    'norm_bytes(tokens, width, sizes, norm == "rmsnorm")',
)
p.write_text(s)
p = Path("training/model/attention.py")
s = p.read_text()
s = s.replace(
    """        value_BTGtK = self._clipped(value_BTF).unflatten(-1, (-1, self.head_dim))
""",
    """        value_BTGtK = self._clipped(value_BTF).unflatten(-1, (-1, self.head_dim))
        if not _share_memory(query_BTHtK, value_BTGtK):  # else it would keep the memory of the joint product
            value_BTGtK = value_BTGtK.contiguous()
""",
)
s = s.replace(
    """def _share_of_heads(""",
    """def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _share_of_heads(""",
    1,
)
p.write_text(s)
