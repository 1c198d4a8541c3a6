"""Which models of transformers work under tensor parallelism by rules, and which have a plan of the peers.

For each family a tiny random model, on two ranks: loss and gradients against one process, collectives against
Megatron's plan for the same layers, and the loss under transformers' own plan (`tp_plan="auto"`), where the class has
one, and under DeepSpeed's AutoTP, where that is installed (`pip install deepspeed`; DS_ACCELERATOR=cpu without a GPU).

    DS_ACCELERATOR=cpu python benchmarks/auto_tp.py --output auto_tp.md
"""

import argparse
import importlib
import tempfile
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measure  # noqa: F401 (makes tests/support importable)
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gristmill.training.auto_tp.apply_plan import ShardedRegion, apply_plan, whole_parameters
from gristmill.training.auto_tp.plan import NO_LINEAR, CollectiveCounter, LayerRole, hand_plan_collectives, pattern
from gristmill.training.auto_tp.transformers_folder import plan_for
from tests.support.forked_pool import ForkedPool, RankFailed

RANKS = 2
TOLERANCE = 1e-5
SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
GPT = {"vocab_size": 64, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "GPT2LMHeadModel": GPT,
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "OPTForCausalLM": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "T5ForConditionalGeneration": T5,
    "Qwen3ForCausalLM": GROUPED | {"head_dim": 8},
    "Gemma2ForCausalLM": GROUPED | {"head_dim": 8},
    "BertForMaskedLM": SIZES | {"intermediate_size": 48, "max_position_embeddings": 32},
    "MambaForCausalLM": {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32},
    "Phi3ForCausalLM": GROUPED | {"pad_token_id": 0},
    "GPTNeoXForCausalLM": SIZES | {"intermediate_size": 64},
    "FalconForCausalLM": SIZES | {"multi_query": True},
    "BloomForCausalLM": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "MptForCausalLM": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2},
    "Olmo2ForCausalLM": GROUPED,
    "MixtralForCausalLM": GROUPED | {"num_local_experts": 4, "sliding_window": None},
    "Qwen3MoeForCausalLM": GROUPED
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GPTBigCodeForCausalLM": GPT,
}


def build(name: str, device: str = "cpu") -> Any:
    """The model in evaluation mode, which turns dropout off; the same weights in every call."""
    architecture = getattr(transformers, name)
    config = architecture.config_class(**MODELS[name])
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        return architecture(config).eval()


def loss_of(model: Any, counter: Any = None) -> torch.Tensor:
    """counter: of the model's collectives; gathering the logits is no part of a plan."""
    tokens, targets = torch.randint(0, 64, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with counter or nullcontext():
        logits = model(input_ids=tokens, **decoder).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_rules(name: str) -> dict[str, Any]:
    """On each rank: the largest difference to one process, collectives, and the share of parameters that is sharded."""
    warnings.simplefilter("ignore")
    model, alone = build(name), build(name)
    plan, traced = plan_for(build(name, "meta"), RANKS)
    grid = init_device_mesh("cpu", (RANKS,))
    apply_plan(model, plan, grid)
    counter = CollectiveCounter()
    with ShardedRegion(grid):
        loss = loss_of(model, counter)
        with counter:
            loss.backward()
    expected = loss_of(alone)
    expected.backward()
    gradients = dict(whole_parameters(model, lambda parameter: parameter.grad))
    worst = max(
        (gradients[key] - each.grad).abs().max().item()
        for key, each in alone.named_parameters()
        if each.grad is not None
    )
    parameters = list(model.parameters())
    sharded = sum(each.numel() for each in parameters if isinstance(each, DTensor) and each.placements[0].is_shard())
    replicated = [layer for layer in plan.having(LayerRole.REPLICATED) if layer.name not in traced.embeddings]
    reasons = sorted(
        {
            f"{pattern(layer.name)}: {NO_LINEAR}" if layer.reason == NO_LINEAR else pattern(layer.reason)
            for layer in replicated
        }
    )
    return {
        "difference": max(abs(loss.item() - expected.item()), worst),
        "collectives": counter.total,
        "by_hand": hand_plan_collectives(plan, traced),
        "sharded": sharded / sum(each.numel() for each in parameters),
        "reasons": reasons,
    }


def by_transformers(name: str, folder: str) -> float:
    """On each rank: the difference of the loss under transformers' own plan to one process."""
    warnings.simplefilter("ignore")
    architecture = getattr(transformers, name)
    grid = init_device_mesh("cpu", (RANKS,))
    model = architecture.from_pretrained(folder, tp_plan="auto", device_mesh=grid, use_safetensors=True).eval()
    with torch.no_grad():
        return abs(loss_of(model).item() - loss_of(build(name)).item())


def by_deepspeed(name: str) -> float:
    """On each rank: the difference of the loss under DeepSpeed's AutoTP to one process."""
    warnings.simplefilter("ignore")
    deepspeed = importlib.import_module("deepspeed")
    # torch's all-reduce in the place of DeepSpeed's own for CPUs, which is compiled when it is first used.
    deepspeed.comm.inference_all_reduce = lambda x, op=None, group=None, **_: dist.all_reduce(x, group=group)
    degree = {"tp_size": RANKS}
    engine = deepspeed.init_inference(build(name), tensor_parallel=degree, dtype=torch.float32)
    with torch.no_grad():
        return abs(loss_of(engine.module).item() - loss_of(build(name)).item())


def deepspeed_version() -> str:
    return f"deepspeed {version('deepspeed')}" if find_spec("deepspeed") else "without deepspeed"


def deepspeed_cell(name: str) -> str:
    """In processes of its own, for DeepSpeed changes modules of others as it is imported."""
    if find_spec("deepspeed") is None:
        return "not installed"
    pool = ForkedPool(RANKS)
    try:
        return verdict(max(pool.run(RANKS, by_deepspeed, name)))
    except RankFailed as failure:
        return reason_of(failure)
    finally:
        pool.close()


def peer_cell(name: str, pool: ForkedPool, root: Path) -> str:
    model = build(name, "meta")
    if not getattr(model, "_tp_plan", None):
        return "no plan"
    build(name).save_pretrained(root / name)
    try:
        difference = max(pool.run(RANKS, by_transformers, name, str(root / name)))
    except RankFailed as failure:
        return reason_of(failure)
    return verdict(difference)


def verdict(difference: float) -> str:
    return "works" if difference < TOLERANCE else f"another loss, by {difference:.1g}"


def reason_of(failure: RankFailed) -> str:
    return f"fails: {str(failure).strip().splitlines()[-1][:80]}".replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pool = ForkedPool(RANKS)
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}, {deepspeed_version()}, {RANKS} ranks on "
        "CPU.",
        "",
        "| model | by rules | largest difference | collectives | Megatron's | sharded | transformers' plan | "
        "DeepSpeed | replicated because |",
        "|---|---|---:|---:|---:|---:|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as root:
        for name in options.models:
            found = pool.run(RANKS, by_rules, name)[0]
            works = "works" if found["difference"] < TOLERANCE else "differs"
            lines.append(
                f"| {name} | {works} | {found['difference']:.1e} | {found['collectives']} | {found['by_hand']} | "
                f"{found['sharded']:.0%} | {peer_cell(name, pool, Path(root))} | {deepspeed_cell(name)} | "
                f"{'; '.join(found['reasons'])} |"
            )
            print(lines[-1], flush=True)
    pool.close()
    options.output.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    assert dist.is_available()
    main()
