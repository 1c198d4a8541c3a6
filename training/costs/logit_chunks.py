"""How many logits of the loss are in memory at once. Without torch: the planner counts them too."""

CHUNK_LOGITS = 2**24  # of one chunk on CPU: 64 MB of float32; fewer rows slow its matmuls (64 rows: by a third)
# In 16 bits: 128 MB, because the gradient of the table is then summed outside of the products, a pass for each chunk.
CHUNK_LOGITS_16 = 2**26
CHUNK_LOGITS_GPU = 2**27  # 512 MB: large enough to fill the device, small beside its memory


def chunk_logits(number_bytes: int, cuda: bool) -> int:
    """The most logits of one chunk. number_bytes: of one."""
    if cuda:
        return CHUNK_LOGITS_GPU
    return CHUNK_LOGITS if number_bytes > 2 else CHUNK_LOGITS_16
