"""Sizes of tiny models of transformers, shared by the tests of conversion."""

from typing import Any

LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
NEMOTRON_H_SHAPE: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*-",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
}
