"""GGUF files: the imported model has the dequantized weights, and damaged or hostile files are refused."""

import random
import struct

import gguf
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gristmill.evaluation.convert.gguf_file import check_gguf, is_gguf
from gristmill.evaluation.import_export import import_checkpoint
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.errors import InputError
from tokenizers import pre_tokenizers

LAYERS, WIDTH, HEADS, FFN = 2, 64, 4, 96
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = [*LETTERS, "th", "<|endoftext|>"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    if name.startswith("model.layers."):
        _, _, layer, *rest, kind = name.split(".")
        return f"blk.{layer}.{NAMES['.'.join(rest)]}.{kind}"
    stem, kind = name.rsplit(".", 1)
    return f"{OUTER[stem]}.{kind}"


def written_model(path):
    """A Qwen2 model whose matrices the file holds as Q8_0; returned with the weights that the file stands for."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(PIECES), hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(PIECES)
    writer.add_token_types([1] * (len(PIECES) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(PIECES) - 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            if values.ndim < 2:
                writer.add_tensor(gguf_name(name), values)
                continue
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
            writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_is_imported_with_its_tokenizer(tmp_path):
    model = written_model(tmp_path / "tiny.gguf")
    assert is_gguf(tmp_path / "tiny.gguf")
    checkpoint = import_checkpoint(tmp_path / "tiny.gguf", tmp_path / "imported")
    loaded = load_for_evaluation(CheckpointPaths(checkpoint, tmp_path / "imported" / "tokenizer"), EvaluateConfig())
    ids = loaded.tokenizer.encode_prompt("the thin moth")
    assert [PIECES[token] for token in ids[:2]] == ["th", "e"] and loaded.tokenizer.ends == (len(PIECES) - 1,)
    tokens = torch.tensor([ids])
    own = loaded.causal_lm.head(loaded.causal_lm.hidden(tokens)[0])
    torch.testing.assert_close(own[:, : len(PIECES)], model(tokens).logits[0], atol=1e-4, rtol=1e-4)


def test_damaged_and_hostile_files_are_refused(tmp_path):
    path, bad = tmp_path / "tiny.gguf", tmp_path / "bad.gguf"
    written_model(path)
    content = path.read_bytes()
    check_gguf(path)
    for end in (0, 3, 20, 100, len(content) // 2, len(content) - 64):
        bad.write_bytes(content[:end])
        with pytest.raises(InputError, match="not a valid GGUF file"):
            check_gguf(bad)
    huge = struct.pack("<Q", 2**62)
    for place in (8, 16, 24):  # counts of tensors and fields, the length of the first name
        bad.write_bytes(content[:place] + huge + content[place + 8 :])
        with pytest.raises(InputError, match="not a valid GGUF file"):
            import_checkpoint(bad, tmp_path / "never")
    layers = content.index(b"qwen2.block_count") + len(b"qwen2.block_count") + 4
    bad.write_bytes(content[:layers] + struct.pack("<I", 10**9) + content[layers + 4 :])
    with pytest.raises(InputError, match="block_count is 1000000000, and no tensor is so large"):
        import_checkpoint(bad, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_no_changed_byte_of_the_header_ends_in_another_error(tmp_path):
    path, bad = tmp_path / "tiny.gguf", tmp_path / "bad.gguf"
    written_model(path)
    content, rng = path.read_bytes(), random.Random(0)
    end = content.index(b"token_embd.weight") + 200
    refused = 0
    for _ in range(300):
        place = rng.randrange(4, end)
        bad.write_bytes(content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :])
        try:
            check_gguf(bad)
        except InputError:
            refused += 1
    assert refused > 20
