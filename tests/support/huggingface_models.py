"""Tiny models of transformers, one or more of each decoder family, with random weights."""

from typing import Any

import torch
import transformers

from tests.support.huggingface_shapes import LLAMA_SHAPE, NEMOTRON_H_SHAPE

SHAPE = LLAMA_SHAPE
EQUAL_HEADS = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
ENDS = {"vocab_size": 99, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
GPTJ = {**ENDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
OPT = {
    **ENDS,
    "hidden_size": 32,
    "ffn_dim": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
}
FALCON = {
    **ENDS,
    "hidden_size": 32,
    "ffn_hidden_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 6.0,
}
GEMMA = {**SHAPE, "head_dim": 16}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, **fields}}


def turned(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": share}}


def two_bases(full: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    return {"rope_parameters": {"full_attention": {"rope_theta": 5000.0, **full}, "sliding_attention": sliding}}


CONFIGS = {
    "llama3": transformers.LlamaConfig(**SHAPE, **rope("llama3", **LLAMA3)),
    "llama_linear": transformers.LlamaConfig(**SHAPE, **rope("linear"), tie_word_embeddings=True),
    "llama_yarn": transformers.LlamaConfig(**SHAPE, **rope("yarn", **YARN)),
    "llama_yarn_own_factor": transformers.LlamaConfig(**SHAPE, **rope("yarn", **YARN, attention_factor=1.5)),
    "llama_yarn_mscale": transformers.LlamaConfig(**SHAPE, **rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.5)),
    "llama_attention_bias": transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "llama_mlp_bias": transformers.LlamaConfig(**SHAPE, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=7, head_dim=16),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2_windows": transformers.Qwen2Config(**SHAPE, **WINDOWS, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_bias": transformers.Qwen3Config(**SHAPE, **WINDOWS, head_dim=16, attention_bias=True),
    "starcoder2": transformers.Starcoder2Config(**SHAPE, sliding_window=7, tie_word_embeddings=True),
    "gpt_neox": transformers.GPTNeoXConfig(**EQUAL_HEADS, **turned(0.5)),
    "gpt_neox_sequential": transformers.GPTNeoXConfig(
        **EQUAL_HEADS, **turned(0.25), use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new"
    ),
    "gptj": transformers.GPTJConfig(**GPTJ, rotary_dim=6),
    "gptj_whole_heads": transformers.GPTJConfig(**GPTJ, rotary_dim=8, n_inner=28),
    "phi": transformers.PhiConfig(**SHAPE, **turned(0.5)),
    "phi_qk_norm": transformers.PhiConfig(**SHAPE, **turned(1.0), qk_layernorm=True),
    "phi3": transformers.Phi3Config(**SHAPE),
    "phi3_part": transformers.Phi3Config(**SHAPE, **turned(0.75), sliding_window=7, tie_word_embeddings=True),
    "opt": transformers.OPTConfig(**OPT),
    "opt_post": transformers.OPTConfig(**OPT, do_layer_norm_before=False, enable_bias=False),
    "opt_plain_norm": transformers.OPTConfig(**OPT, layer_norm_elementwise_affine=False),
    "olmo": transformers.OlmoConfig(**SHAPE, clip_qkv=0.5),
    "olmo2": transformers.Olmo2Config(**SHAPE, attention_bias=True),
    "olmo3": transformers.Olmo3Config(**SHAPE, sliding_window=7, layer_types=KINDS),
    "olmo3_no_window": transformers.Olmo3Config(**SHAPE, layer_types=["full_attention"] * 3),
    "olmo3_yarn": transformers.Olmo3Config(
        **SHAPE, sliding_window=7, layer_types=KINDS, **two_bases({"rope_type": "yarn", "factor": 4.0, **YARN})
    ),
    "gemma": transformers.GemmaConfig(**GEMMA),
    "gemma2": transformers.Gemma2Config(
        **GEMMA, sliding_window=7, query_pre_attn_scalar=12, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA, sliding_window=7, layer_types=KINDS, **two_bases({"rope_type": "linear", "factor": 8.0})
    ),
    "gemma3_no_window": transformers.Gemma3TextConfig(**GEMMA, layer_types=["full_attention"] * 3),
    "smollm3": transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]),
    "smollm3_windows": transformers.SmolLM3Config(
        **SHAPE, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=7, tie_word_embeddings=False
    ),
    "granite": transformers.GraniteConfig(**SHAPE, **GRANITE, tie_word_embeddings=True),
    "falcon_7b": transformers.FalconConfig(**FALCON),
    "falcon_40b": transformers.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_11b": transformers.FalconConfig(
        **FALCON, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    "falcon_sequential": transformers.FalconConfig(**FALCON, parallel_attn=False, multi_query=False, bias=True),
    "nemotron": transformers.NemotronConfig(**SHAPE, **turned(0.5), head_dim=16, hidden_act="relu2"),
    "nanochat": transformers.NanoChatConfig(**SHAPE, final_logit_softcapping=3.0),
}

EXPERTS = SHAPE | {"num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": transformers.MixtralConfig(**EXPERTS, num_local_experts=4),
    "mixtral_window": transformers.MixtralConfig(**EXPERTS, num_local_experts=3, sliding_window=7),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **EXPERTS, head_dim=16, num_experts=6, moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": transformers.OlmoeConfig(**EXPERTS, num_experts=8),
}
LATENT = {name: value for name, value in EXPERTS.items() if name != "num_key_value_heads"} | {
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_YARN = rope("yarn", original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.5)
MIXTURES |= {
    "deepseek_v2_lite": transformers.DeepseekV2Config(**LATENT, q_lora_rank=None, **DEEPSEEK_YARN),
    "deepseek_v2": transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=6, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=6, n_group=2, topk_group=1, num_nextn_predict_layers=0, **DEEPSEEK_YARN
    ),
}
CONFIGS["deepseek_dense"] = transformers.DeepseekV3Config(
    **(LATENT | {"first_k_dense_replace": 3, "v_head_dim": 16}), q_lora_rank=None, num_nextn_predict_layers=0
)
HYBRIDS = {
    "mamba2": transformers.Mamba2Config(
        num_hidden_layers=3, hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=1, vocab_size=99
    ),
    "nemotron_h": transformers.NemotronHConfig(**NEMOTRON_H_SHAPE, vocab_size=99),
}


def random_model(config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
