"""The two sides of `train_step.py`, each made in a process of its own: gristmill's step, and the same step of a peer
with the same weights."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from peers.nanogpt import from_gristmill
from support.step_counts import StepCounts, step_counts
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.engine.gradients import Gradients
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.engine.passes import ForwardBackward
from gristmill.training.launch.processes import keep_freed_memory
from gristmill.training.optim.optimizer import AdamW
from gristmill.training.parallel.mesh import Mesh, single_process, sum_over_world
from gristmill.training.run import RunConfig, build_forward_backward

CLIP = 1.0
LLAMA_NAMES = {
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


@dataclass(frozen=True)
class Setting:
    """One comparison. figure: its name. llama: the model is a Llama, which transformers has too, else a GPT-2."""

    figure: str
    model: ModelConfig
    vocab: int
    samples: int
    precision: str
    compiled: bool
    device: torch.device
    llama: bool = False
    float8: bool = False  # ours alone; the peer stays in bf16
    cuda_graphs: bool = False  # ours alone

    @property
    def tokens(self) -> int:
        return self.samples * self.model.sequence_length

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(
            tokens=1,
            batch_tokens=1,
            precision=self.precision,
            compile=self.compiled,
            float8=self.float8,
            cuda_graphs=self.cuda_graphs,
        )


class Side:
    """Calls do one step on the same batch and return the mean loss."""

    def __init__(self, setting: Setting, steps: "Ours | Theirs"):
        self.steps, self.batch = steps, batch(setting)

    def __call__(self) -> float:
        return self.steps.step(*self.batch)


def our_side(setting: Setting, threads: int) -> Side:
    """With the allocator as the stage `train` sets it."""
    torch.set_num_threads(threads)
    if setting.device.type == "cpu":
        keep_freed_memory()
    return Side(setting, Ours.of(setting))


def peer_side(setting: Setting, threads: int, keeps_memory: bool) -> Side:
    """With the C library's own allocator, unless keeps_memory gives it what ours has."""
    torch.set_num_threads(threads)
    if keeps_memory:
        keep_freed_memory()
    weights = {name: value.detach().clone() for name, value in Ours.of(setting).parts.parameters.items()}
    return Side(setting, Theirs(setting, weights))


def loss_of_a_step(side: Side) -> float:
    return side()


def counts_of_a_step(side: Side) -> tuple[StepCounts, int]:
    """And the bytes of parameters and optimizer state."""
    return step_counts(side), side.steps.state_bytes


def batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Tokens and targets int64[B, T], drawn."""
    generator = torch.Generator().manual_seed(0)
    shape = (setting.samples, setting.model.sequence_length + 1)
    drawn = torch.randint(0, setting.vocab, shape, generator=generator)
    return drawn[:, :-1].contiguous().to(setting.device), drawn[:, 1:].contiguous().to(setting.device)


class Ours:
    """The training step of `trainer.py` without its data, guard and logs."""

    def __init__(self, setting: Setting, train: TrainConfig, mesh: Mesh):
        self.mesh, self.tokens = mesh, setting.tokens
        self.parts: LocalModel = build_local_model(setting.model, setting.vocab, train, mesh, seed=1)
        self.optimizer = AdamW(self.parts.parameters, OptimizerConfig(), setting.model)
        self.gradients = Gradients(self.parts, mesh)
        config = RunConfig(setting.model, train, 1)
        self.passes: ForwardBackward = build_forward_backward(self.parts, config, mesh, causal_loss())

    @classmethod
    def of(cls, setting: Setting) -> "Ours":
        """In this process alone, with one micro-batch."""
        config = setting.train.model_dump() | {"layout": {"micro_batch": setting.samples}}
        return cls(setting, TrainConfig.model_validate(config), single_process(setting.device))

    def step(self, x: Tensor, y: Tensor) -> float:
        self.gradients.begin(1.0)
        batch = {"tokens": x, "targets": y, "weights": torch.ones_like(x, dtype=torch.float32)}
        losses = self.passes.train(batch, [1 / self.tokens])
        self.gradients.ready()
        own = 0.0 if losses is None else losses[:, 0].sum(dtype=torch.float64)
        total, square = sum_over_world([own, self.gradients.square_sum()], self.mesh).tolist()
        self.gradients.clip(math.sqrt(square), CLIP)
        self.optimizer.step(1.0)
        self.parts.update_copies()
        self.gradients.clear()
        return total / self.tokens

    @property
    def state_bytes(self) -> int:
        """Of parameters and optimizer state."""
        held = [*self.parts.parameters.values(), *self.optimizer.state().values()]
        return sum(each.nbytes for each in held)


class Theirs:
    """The peer in a plain loop: autocast for bf16, clipping, fused AdamW."""

    def __init__(self, setting: Setting, weights: dict[str, Tensor]):
        self.setting = setting
        config = setting.model
        plain: Any = (
            llama(config, setting.vocab, weights)
            if setting.llama
            else from_gristmill(weights, config.layers, config.heads)
        )
        self.plain = plain.to(setting.device)
        self.model = torch.compile(self.plain) if setting.compiled else self.plain
        options = OptimizerConfig()
        self.optimizer = torch.optim.AdamW(
            self.plain.parameters(), lr=options.learning_rate, betas=options.betas, eps=options.epsilon, fused=True
        )

    def step(self, x: Tensor, y: Tensor) -> float:
        with torch.autocast(self.setting.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16"):
            if self.setting.llama:
                loss = self.model(x, labels=y, shift_labels=y, use_cache=False).loss
            else:
                loss = self.model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    @property
    def state_bytes(self) -> int:
        return sum(3 * each.nbytes for each in self.plain.parameters())


def llama(model: ModelConfig, vocab: int, weights: dict[str, Tensor]) -> LlamaForCausalLM:
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
        for ours, theirs in LLAMA_NAMES.items():
            renamed[f"model.layers.{layer}.{theirs}.weight"] = weights[f"layers.{layer}.{ours}.weight"]
    other = LlamaForCausalLM(config)
    other.load_state_dict(renamed)
    return other
