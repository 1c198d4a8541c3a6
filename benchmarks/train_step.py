"""Time of a training step, compared with transformers' model of the same architecture and weights in a plain loop.

Both: the same tokens, AdamW (fused), clipping, the same precision; equal losses are checked in the same run. MFU is
model FLOP/s (6 a matrix element a token, attention counted in full) over the best matmul rate measured on this
machine."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Figure, arguments, cpu_seconds, in_turn, print_figures, wall_seconds
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gristmill.training.config import TrainConfig
from gristmill.training.costs.flops import flops_per_token
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.device_peak import device_peak
from gristmill.training.engine.forward_backward import GradientAccumulation
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model_config import ModelConfig
from gristmill.training.optim.adamw import AdamW
from gristmill.training.optim.norm import clip, global_norm
from gristmill.training.optimizer_config import OptimizerConfig
from gristmill.training.parallel.mesh import single_process
from gristmill.training.testing.causal_loss import causal_loss

# Width, depth and vocabulary of a published small Llama, stories15M (karpathy/llama2.c: 6 layers of 288, the 32,000
# tokens of Llama 2), with the default sequence length. A toy vocabulary would leave out what the loss costs.
SMALL = (ModelConfig(layers=6, width=288, heads=6, sequence_length=512), 32000, 4)
ON_GPU = (ModelConfig(layers=16, width=2048, heads=16, kv_heads=8, sequence_length=2048), 32768, 8)  # about 1 B
NAMES = {
    "mixer.query": "self_attn.q_proj",
    "mixer.key": "self_attn.k_proj",
    "mixer.value": "self_attn.v_proj",
    "mixer.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mixer_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


@dataclass
class Setting:
    """One comparison: model, vocabulary, samples a batch, precision, compilation, device."""

    model: ModelConfig
    vocab: int
    samples: int
    precision: str
    compiled: bool
    device: torch.device
    float8: bool = False  # ours alone; the peer stays in bf16

    @property
    def name(self) -> str:
        precision = "float8" if self.float8 else self.precision
        return f"train_step_{precision}" + ("_compiled" if self.compiled else "")

    @property
    def tokens(self) -> int:
        return self.samples * self.model.sequence_length


class Ours:
    def __init__(self, setting: Setting):
        mesh = single_process(setting.device)
        train = TrainConfig(
            tokens=1,
            batch_tokens=1,
            precision=setting.precision,
            compile=setting.compiled,
            float8=setting.float8,
        )
        self.mesh, self.tokens = mesh, setting.tokens
        self.parts = build_local_model(
            setting.model,
            setting.vocab,
            train,
            mesh,
            seed=1,
        )
        self.optimizer = AdamW(self.parts.parameters, OptimizerConfig(), setting.model)
        self.passes = GradientAccumulation(self.parts.stages[0], setting.samples, causal_loss())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        losses = self.passes.train(
            {"tokens": x, "targets": y, "weights": torch.ones_like(x).float()}, [1 / self.tokens]
        )
        norm = global_norm(self.parts.norm_parameters, self.mesh).item()
        clip(self.parts.parameters.values(), norm, 1.0)
        self.optimizer.step(1.0)
        self.parts.clear_gradients()
        return losses[:, 0].sum().item() / self.tokens


class Theirs:
    def __init__(self, setting: Setting, weights: dict[str, torch.Tensor]):
        self.device, self.precision = setting.device, setting.precision
        plain: Any = llama(setting.model, setting.vocab, weights)
        plain = plain.to(setting.device)
        self.model = torch.compile(plain) if setting.compiled else plain
        config = OptimizerConfig()
        self.optimizer = torch.optim.AdamW(
            plain.parameters(), lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.model(x, labels=y, shift_labels=y, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def llama(model: ModelConfig, vocab: int, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=model.width,
        intermediate_size=model.hidden_width("swiglu"),
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.sequence_length,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=False,
    )
    renamed = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["final_norm.weight"],
        "lm_head.weight": weights["head.weight"],
    }
    for layer in range(model.layers):
        for ours, theirs in NAMES.items():
            renamed[f"model.layers.{layer}.{theirs}.weight"] = weights[f"layers.{layer}.{ours}.weight"]
    other = LlamaForCausalLM(config)
    other.load_state_dict(renamed)
    return other


def compare(setting: Setting, rounds: int) -> Figure:
    ours = Ours(setting)
    weights = {name: value.detach().clone() for name, value in ours.parts.parameters.items()}
    theirs = Theirs(setting, copy.deepcopy(weights))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, setting.vocab, (setting.samples, setting.model.sequence_length + 1), generator=generator)
    x, y = (part.contiguous().to(setting.device) for part in (drawn[:, :-1], drawn[:, 1:]))
    own, other = ours.step(x, y), theirs.step(x, y)
    tolerance = 1e-4 if setting.precision == "fp32" else 5e-2 if setting.float8 else 2e-2
    if abs(own - other) > tolerance:
        raise SystemExit(f"losses differ: {own} and {other}")
    clock = cpu_seconds if setting.device.type == "cpu" else wall_seconds
    seconds, peer_seconds, ratio = in_turn(partial(ours.step, x, y), partial(theirs.step, x, y), rounds, clock)
    flops = flops_per_token(shape_of(setting.model, setting.vocab)) * setting.tokens
    peak = device_peak(setting.device) or matmul_peak(setting.precision)
    Console().print(
        f"{setting.name}: loss {own:.5f} and {other:.5f}; MFU {flops / seconds / peak:.1%} and "
        f"{flops / peer_seconds / peak:.1%} of {peak / 1e9:.0f} GFLOP/s",
        highlight=False,
    )
    return Figure(
        setting.name,
        setting.tokens / seconds,
        "tokens/s/core" if setting.device.type == "cpu" else "tokens/s",
        setting.tokens / peer_seconds,
        "transformers",
        ratio,
        1.2 if setting.device.type == "cpu" else None,
    )


def matmul_peak(precision: str) -> float:
    """Best FLOP/s of a square matmul on one core."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    best = 0.0
    for size in (512, 1024, 2048):
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        seconds = min(cpu_seconds(partial(torch.matmul, left, right)) for _ in range(5))
        best = max(best, 2 * size**3 / seconds)
    return best


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)  # by the processor time of one thread: a busy machine does not change it
    if torch.cuda.is_available():
        device, shape, rounds = torch.device("cuda"), ON_GPU, 10
    else:
        device, shape, rounds = torch.device("cpu"), SMALL, 3 if options.quick else 7
    figures = []
    for compiled in (False,) if options.quick else (False, True):
        for precision in ("fp32", "bf16"):
            figures.append(compare(Setting(*shape, precision, compiled, device), rounds))
    if device.type == "cuda":
        figures.append(compare(Setting(*shape, "bf16", True, device, float8=True), rounds))
    print_figures(figures)


if __name__ == "__main__":
    main()
