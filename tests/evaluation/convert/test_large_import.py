"""A checkpoint of 20 GB, larger than the memory that its import may take."""

import json
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.evaluation.convert.huggingface import copy_tokenizer

WIDTH, HIDDEN, VOCAB, LAYERS, FILES = 4096, 11008, 32000, 24, 4
MAX_GIGABYTES = 2.0  # of the process that imports: 0.5 for torch, and the largest tensors (0.52 GB) as they are copied
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH,
    "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 256,
}  # fmt: skip
IMPORT = """
import sys
from pathlib import Path
from gristmill.evaluation import import_export as export
export.check_tokenizer = lambda *_, **__: None  # a tokenizer of 257 tokens beside a table of 32000 rows
export.import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    found["model.norm.weight"] = (WIDTH,)
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{place}.self_attn.{name}.weight"] = (WIDTH, WIDTH)
        for name in ("gate_proj", "up_proj"):
            found[f"{place}.mlp.{name}.weight"] = (HIDDEN, WIDTH)
        found[f"{place}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}.{name}.weight"] = (WIDTH,)
    return found


def write_sparse(path: Path, held: dict[str, tuple[int, ...]]) -> int:
    """A safetensors file of zeros that takes no space on the disk; returns its size in bytes."""
    header, end = {}, 0
    for name, shape in held.items():
        count = 4
        for size in shape:
            count *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.slow
def test_20_gigabytes_are_imported_in_little_memory(tmp_path, tokenizer_folder):
    if shutil.disk_usage(tmp_path).free < 25e9:
        pytest.skip("needs 25 GB of free disk")
    source, every = tmp_path / "theirs", shapes()
    source.mkdir()
    copy_tokenizer(tokenizer_folder, source)
    (source / "config.json").write_text(json.dumps(CONFIG))
    names, index, size = list(every), {}, 0
    for number in range(FILES):
        file, held = f"model-{number}.safetensors", names[number::FILES]
        size += write_sparse(source / file, {name: every[name] for name in held})
        index |= dict.fromkeys(held, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert size > 20e9
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORT, source, tmp_path / "in"], check=True)
    seconds = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\n{size / 1e9:.1f} GB in {seconds:.0f} s, {size / seconds / 1e6:.0f} MB/s, peak {peak / 1e9:.2f} GB")
    shutil.rmtree(tmp_path / "in")
    assert peak < MAX_GIGABYTES * 1e9
