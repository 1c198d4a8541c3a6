"""How many logits of the loss are in memory at once. Without torch: the planner counts them too."""

CHUNK_LOGITS = 2**24  # of one chunk on CPU: 64 MB of float32; fewer rows slow its matmuls (64 rows: by a third)
CHUNK_LOGITS_GPU = 2**27  # 512 MB: large enough to fill the device, small beside its memory
