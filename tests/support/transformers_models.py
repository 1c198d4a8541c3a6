"""Tiny random models of transformers, of families that differ in what a tensor-parallel plan meets."""

from typing import Any

import torch
from torch import nn

VOCABULARY = 64
TWO_LAYERS = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
GPT2_NAMES = {"vocab_size": VOCABULARY, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}
GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2}

# family -> (class, fields of its config). OPT, BERT and GPT-2 have dropout, which parity needs off.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TWO_LAYERS | GROUPED),
    "gpt2": ("GPT2LMHeadModel", GPT2_NAMES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gptj": ("GPTJForCausalLM", GPT2_NAMES | {"rotary_dim": 4}),
    "opt": (
        "OPTForCausalLM",
        TWO_LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "dropout": 0.0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", TWO_LAYERS | GROUPED | {"head_dim": 8}),
    "gemma": ("Gemma2ForCausalLM", TWO_LAYERS | GROUPED | {"head_dim": 8}),
    "bert": (
        "BertForMaskedLM",
        TWO_LAYERS
        | {"intermediate_size": 48, "max_position_embeddings": 32}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 32}),
    # held out: no rule was written for them
    "phi3": ("Phi3ForCausalLM", TWO_LAYERS | GROUPED | {"pad_token_id": 0}),
    "neox": ("GPTNeoXForCausalLM", TWO_LAYERS | {"intermediate_size": 64, "hidden_dropout": 0.0}),
    "falcon": ("FalconForCausalLM", TWO_LAYERS | {"multi_query": True}),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "olmo2": ("Olmo2ForCausalLM", TWO_LAYERS | GROUPED),
    "cohere": ("CohereForCausalLM", TWO_LAYERS | GROUPED),
    "mixtral": ("MixtralForCausalLM", TWO_LAYERS | GROUPED | {"num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        TWO_LAYERS | GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "bigcode": ("GPTBigCodeForCausalLM", GPT2_NAMES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mpt": ("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "odd_heads": ("LlamaForCausalLM", TWO_LAYERS | {"hidden_size": 36, "num_attention_heads": 3}),
    "odd_vocabulary": ("GPT2LMHeadModel", GPT2_NAMES | {"vocab_size": 61, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gemma3": ("Gemma3ForCausalLM", TWO_LAYERS | GROUPED | {"head_dim": 8, "sliding_window": 4}),
}


def tiny_model(family: str, device: str = "cpu", **fields: Any) -> nn.Module:
    """The family's model with random weights, the same in every call. embd_pdrop and the like are zero."""
    import transformers

    name, own = FAMILIES[family]
    architecture = getattr(transformers, name)
    config = architecture.config_class(**{**own, **fields})
    config.use_cache = False
    for field in ("embd_pdrop", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    torch.manual_seed(0)
    with torch.device(device):
        return architecture(config).train()
