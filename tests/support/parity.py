"""Compares training on a layout with training in one process, and breaks the engine on purpose."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import side_losses_scaled_by
from gristmill.training.model.attention.ring_plan import visible_tokens
from gristmill.training.objectives.objective import Batches, LossFunction, SampleSource, stack_samples
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.collectives import gather_tokens, sum_over_ranks
from gristmill.training.parallel.context import Passing, exchange_tokens
from gristmill.training.parallel.mesh import Mesh, build_mesh, single_process, stored_like
from gristmill.training.parallel.tensor import Sharding
from gristmill.training.planner.layout_checks import check_layout
from gristmill.training.run import RunConfig, build_forward_backward
from gristmill.training.trainer import Trainer
from tests.support.causal_samples import causal_samples
from tests.support.synthetic_pairs import masked_loss

SAMPLES, CONTEXT, STEPS = 16, 16, 2

EXPERTS: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "ffn_hidden_size": 24,
    "moe": {
        "experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 8,
        "shared_experts": 1,
        "balance_loss": 0.1,
        "router_z_loss": 0.05,
        "bias_update_rate": 0.05,
    },
}
BERT: dict[str, Any] = {
    "attention": "bidirectional",
    "positions": "learned",
    "segments": 2,
    "norm": "layernorm",
    "mlp": "gelu",
    "gelu": "exact",
    "layers": 2,
    "width": 16,
    "ffn_hidden_size": 24,
    "kv_heads": 4,
    "biases": True,
    "tied_embeddings": True,
    "head_transform": True,
    "head_bias": True,
    "outputs": [{"name": "sentence_order", "size": 2}],
}
MAMBA2 = {"head_width": 8, "state": 4, "groups": 4, "chunk": 8}
TCNCA = {"kernel": 3, "dilation": 2, "blocks": 2, "chunk": 4, "shared": 6}
GPT2 = {"tied_embeddings": True, "positions": "learned", "norm": "layernorm", "mlp": "gelu", "biases": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied_embeddings": True},
    "gpt2": GPT2,
    "one_kv_head": {"kv_heads": 1, "qk_norm": True, "logit_softcap": 5.0},
    "windows": {"window": (4, None), "norm_order": "post", "init_method": "mup", "mup_base_width": 16},
    # dense and locally banded layers in turn (GPT-3, mGPT)
    "banded": GPT2 | {"layers": 4, "window": (None, 3)},
    "bloom": {"positions": "alibi", "embedding_norm": True, "norm": "layernorm", "mlp": "gelu", "biases": True},
    "qwen2": {
        "biases": "qkv",
        "window": (None, 5),
        "rope_scaling": {"rope_type": "llama3", "factor": 4, "original_max_position_embeddings": 8},
    },
    # attention and MLP in parallel, behind a norm each or one; a part of each head turns
    "gpt_neox": GPT2 | {"positions": "rope", "rope_width": 4, "parallel_residual": True, "tied_embeddings": False},
    "gptj": {
        "norm": "layernorm",
        "mlp": "gelu",
        "biases": "mlp",
        "rope_width": 4,
        "parallel_residual": "one_norm",
        "head_bias": True,
    },
    "opt": GPT2 | {"mlp": "relu", "position_offset": 2},
    # norms without parameters and clipped projections; norms of what attention and MLP return
    "olmo": {"norm": "plain_layernorm", "qkv_clip": 0.1},
    "olmo2": {"norm_order": "output", "rope_layers": (True, False), "qk_norm": "width"},
    "gemma2": {
        "norm_order": "sandwich",
        "norm_plus_one": True,
        "mlp": "geglu",
        "window": (5, None),
        "window_rope_base": 500.0,
        "attention_softcap": 0.5,
        "logit_softcap": 5.0,
        "tied_embeddings": True,
        "scales": {"embedding": 5.7, "residual": 0.5, "attention": 0.4, "logit_divisor": 2.0},
    },
    "nanochat": {
        "norm": "plain_rmsnorm",
        "mlp": "relu2",
        "qk_norm": True,
        "embedding_norm": True,
        "logit_softcap": 5.0,
        "embedding_std": 1.0,
        "zero_outputs": True,
    },
    "deep": {"layers": 8},
    "mamba2": {"mixer": "mamba2", "mlp": "none", "positions": "none", "layers": 4, "mixers": {"mamba2": MAMBA2}},
    "hybrid": {
        "pattern": "M-M*-M-*",
        "layers": 8,
        "mlp": "relu2",
        "positions": "none",
        "mixers": {"mamba2": MAMBA2},
    },
    "hybrid_experts": {
        "pattern": "MEM*",
        "layers": 4,
        "mixers": {"mamba2": MAMBA2},
        "moe": {"experts": 4, "top_k": 2, "ffn_hidden_size": 8, "balance_loss": 0.1},
    },
    "tcnca": {"mixer": "tcnca", "positions": "none", "layers": 4, "mixers": {"tcnca": TCNCA}},
    "tcnca_post": {"mixer": "tcnca", "mlp": "none", "norm_order": "post", "layers": 4, "mixers": {"tcnca": TCNCA}},
    "tcnca_simple": {"pattern": "TT-T", "layers": 4, "mixers": {"tcnca": TCNCA | {"gated": False}}},
    "three_mixers": {"pattern": "MT*-M-T*", "layers": 8, "mixers": {"mamba2": MAMBA2, "tcnca": TCNCA}},
    "latent": {
        "mixer": "latent_attention",
        "head_width": 12,
        "rope_width": 4,
        "mixers": {"latent_attention": {"key_value_rank": 10, "query_rank": 6, "value_width": 6}},
    },
    "bert": BERT,
    "bert_deep": BERT | {"layers": 4},
    "bert_original": BERT | {"norm_order": "post", "embedding_norm": "sum", "final_norm": False},
    "experts": EXPERTS,
    "experts_deep": EXPERTS
    | {"layers": 4, "moe": {"experts": (8, 0), "top_k": 2, "ffn_hidden_size": 8, "balance_loss": 0.1}},
    "experts_by_groups": EXPERTS
    | {
        "moe": {
            "experts": 8,
            "top_k": 4,
            "ffn_hidden_size": 8,
            "router": "sigmoid",
            "gate_scale": 2.5,
            "groups": 4,
            "top_groups": 2,
            "balance_loss": 0.1,
            "balance_over": "batch",
            "bias_update_rate": 0.05,
        }
    },
    "pr_moe": EXPERTS
    | {
        "mlp": "gelu",
        "biases": True,
        "moe": {
            "experts": (4, 8),
            "top_k": 1,
            "ffn_hidden_size": 8,
            "residual": True,
            "normalize_gates": False,
            "capacity_factor": 0.75,
            "balance_loss": 0.1,
        },
    },
    "random_drops": EXPERTS
    | {"moe": {"experts": 4, "top_k": 2, "ffn_hidden_size": 8, "capacity_factor": 0.5, "drop": "random"}},
    "last_drops": EXPERTS | {"moe": {"experts": 4, "top_k": 2, "ffn_hidden_size": 8, "capacity_factor": 0.3}},
}

OWN_RATES: dict[str, dict[str, Any]] = {
    "nanochat": {"embedding_learning_rate": 3e-2, "head_learning_rate": 3e-3, "decay_tables": False}
}


@dataclass(frozen=True)
class Case:
    """vocab 51 divides by nothing here. documents: attention stays inside documents and positions restart."""

    layout: dict[str, Any]
    model: str = "llama"
    precision: str = "fp64"
    vocab: int = 51
    documents: bool = False
    optimizer: str = "adamw"
    compiled: bool = False
    masked: bool = False

    @property
    def deep(self) -> bool:
        """Pipelines need layers to share; other layouts have no more of them than show an error."""
        return "pipeline" in self.layout

    @property
    def loss(self) -> LossFunction:
        return masked_loss(self.configs[0]) if self.masked else causal_loss(z_loss=True)

    @property
    def samples(self) -> SampleSource:
        return self.loss.objective if self.masked else causal_samples(Uneven(self.vocab), self.documents)

    @property
    def configs(self) -> tuple[ModelConfig, TrainConfig]:
        """With as few micro-batches as show an error: two, or two for each pipeline rank."""
        pipeline, data = self.layout.get("pipeline", 1), self.layout.get("data", 1)
        micro_batch = {1: 4, 2: 2}.get(pipeline, 1) * (2 if data == 1 else 1)
        model = {
            "layers": 4 if self.deep else 2,
            "width": 32,
            "heads": 4,
            "kv_heads": 2,
            "sequence_length": CONTEXT,
            "ffn_hidden_size": 48,
            "dropout": 0.1,
        }
        train = {
            "tokens": 2 * STEPS * SAMPLES * CONTEXT,
            "batch_tokens": SAMPLES * CONTEXT,
            "precision": self.precision,
            "z_loss": 1e-2,
            # A large epsilon: where a gradient is zero but for rounding (a key's bias), Adam would follow the rounding.
            "optimizer": {"name": self.optimizer, "learning_rate": 1e-2, "clip_norm": 0.5, "epsilon": 1e-4}
            | OWN_RATES.get(self.model, {}),
            "layout": {"micro_batch": micro_batch} | self.layout,
            "compile": self.compiled,
        }
        return ModelConfig(**(model | MODELS[self.model])), TrainConfig(**train)

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in self.layout.items()]
        extra = [self.model] * (self.model != "llama") + [self.optimizer] * (self.optimizer != "adamw")
        return "-".join(extra + [self.precision] + ["documents"] * self.documents + changed) or "plain"


def by_size(grid: Sequence[Case], rare: Sequence[Case] = ()) -> list[Any]:
    """The cases as parameters of a test, by the number of processes: those of one size share a process group. rare:
    marked slow."""
    cases = [pytest.param(case, id=str(case)) for case in grid]
    cases += [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in rare]
    return sorted(cases, key=lambda case: case.values[0].configs[1].layout.world_size)


class Uneven:
    """Samples whose share of valid tokens differs widely; every fifth has none, so some micro-batches have none."""

    fingerprint = "uneven"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def sample(self, k: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(k)
        tokens = generator.integers(0, self.vocab_size, CONTEXT + 1)
        weights = (generator.random(CONTEXT) < generator.random() * (k % 5 > 0)).astype(np.float32)
        bounds = np.array([0, *sorted(generator.choice(np.arange(1, CONTEXT), 2, replace=False)), CONTEXT])
        positions = np.arange(CONTEXT) - np.repeat(bounds[:-1], np.diff(bounds))
        documents = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "weights": weights,
            "positions": positions,
            "documents": documents,
        }

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return "all"


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


def outcome(case: Case, mesh: Mesh) -> Outcome:
    """A few steps. Of gradients (those of the first) and parameters, the ones that this process's stages hold."""
    model, train = case.configs
    parts = build_local_model(model, case.vocab, train, mesh, seed=7)
    passes = build_forward_backward(parts, RunConfig(model, train, 7), mesh, case.loss)
    batches = Batches(case.samples, mesh.data, mesh.device, on_host=mesh.context.size > 1)
    optimizer = build_optimizer(parts.parameters, train, model, mesh, parts.stream)
    trainer = RecordingTrainer(train, parts, passes, optimizer, batches, mesh)
    reports = [trainer.step() for _ in range(STEPS)]
    values = parts.weights | parts.buffers
    parameters = {name: whole(value.detach()) for name, value in values.items()}
    losses, norms = [report.objective for report in reports], [report.grad_norm for report in reports]
    assert trainer.first_gradients is not None
    return Outcome(losses, norms, trainer.first_gradients, parameters)


class RecordingTrainer(Trainer):
    """Keeps the gradients of the first step, before they are clipped."""

    first_gradients: dict[str, np.ndarray] | None = None

    def _update(self, norm: float, rate_factor: float) -> None:
        if self.first_gradients is None:
            self.first_gradients = {name: whole(self._gradient(name)).copy() for name in self.model.parameters}
        super()._update(norm, rate_factor)

    def _gradient(self, name: str) -> torch.Tensor:
        """In host memory where the host updates the parameter."""
        parameter = self.model.parameters[name]
        host = getattr(self.optimizer, "host_gradients", {})
        return stored_like(host[name], parameter) if name in host else parameter.grad


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy()


def on_this_rank(case: Case, mutation: str | None) -> Outcome:
    with MUTATIONS[mutation]():
        return outcome(case, mesh_of_group(*case.configs))


def mesh_of_group(model: ModelConfig, train: TrainConfig) -> Mesh:
    """Meshes are kept as long as the process group: the pool keeps that while the number of processes is the same."""
    if meshes.get("group") is not dist.group.WORLD:
        meshes.clear()
        meshes["group"] = dist.group.WORLD
    axes = ("data", "replicate", "tensor", "pipeline", "context", "expert", "expert_tensor")
    key_value_shards = math.gcd(model.num_kv_heads, train.layout.tensor)
    key = *(getattr(train.layout, axis) for axis in axes), key_value_shards, model.has_experts
    if key not in meshes:
        meshes[key] = build_mesh(train.layout, model.num_kv_heads, torch.device("cpu"), model.has_experts)
    return meshes[key]


meshes: dict[Any, Any] = {}


@cache
def alone(deep: bool, model: str, precision: str, vocab: int, documents: bool, optimizer: str, masked: bool) -> Outcome:
    layout = {"pipeline": 1} if deep else {}
    return outcome(Case(layout, model, precision, vocab, documents, optimizer, masked=masked), single_process())


def differences(case: Case, pool: Any, mutation: str | None = None) -> dict[str, float]:
    """By what the worst rank differs from one process, relative to the largest element of each tensor."""
    model, train = case.configs
    world_size = train.layout.world_size
    check_layout(model, train, case.vocab, world_size)
    expected = alone(case.deep, case.model, case.precision, case.vocab, case.documents, case.optimizer, case.masked)
    ranks = pool.run(world_size, on_this_rank, case, mutation, timeout_seconds=600 if case.compiled else 180)
    assert set().union(*(rank.gradients for rank in ranks)) == set(expected.gradients)
    return {
        "loss": max(relative(rank.losses, expected.losses) for rank in ranks),
        "norm": max(relative(rank.norms, expected.norms) for rank in ranks),
        "gradients": max(worst(rank.gradients, expected.gradients) for rank in ranks),
        "parameters": max(worst(rank.parameters, expected.parameters) for rank in ranks),
    }


def relative(found: list[float], expected: list[float]) -> float:
    return float(np.max(np.abs(np.array(found) - expected) / np.abs(expected)))


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Small tensors are held against a thousandth of the largest, so that pure rounding is not magnified."""
    floor = 1e-3 * max(float(np.abs(value).max()) for value in expected.values())
    return max(
        float(np.abs(found[name] - expected[name]).max()) / max(float(np.abs(expected[name]).max()), floor)
        for name in found
    )


def patched(*places: tuple[str, Any]) -> Any:
    @contextmanager
    def apply() -> Iterator[None]:
        with ExitStack() as stack:
            for place, value in places:
                stack.enter_context(mock.patch(f"gristmill.training.{place}", value))
            yield

    return apply


def own_share(x_BTD: torch.Tensor, group: Any) -> torch.Tensor:
    size = torch.distributed.get_world_size(group)
    return x_BTD.chunk(size, dim=1)[torch.distributed.get_rank(group)].contiguous()


def only_own_choices(router: Any, experts_NK: torch.Tensor, places: Any) -> torch.Tensor:
    """What a rank knows that does not ask the others."""
    all_NK = torch.zeros(places.samples * places.tokens, experts_NK.shape[1], dtype=torch.int64)
    return all_NK.index_copy(0, places.index_N, experts_NK)


def plain_mean(mixed: torch.Tensor, log_sum: torch.Tensor, new: torch.Tensor, new_sum: torch.Tensor) -> Any:
    """Results of blocks put together without their weights."""
    return (mixed + new) / 2, torch.logaddexp(log_sum, new_sum)


def as_if_contiguous(shares: Any, per_token: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return per_token.chunk(shares.axis.size, dim)[shares.axis.rank]


def without_documents(tokens: int, documents: Any, window: int | None, causal: bool) -> Any:
    return visible_tokens(tokens, None, window, causal)


MUTATIONS: dict[str | None, Any] = {
    None: patched(),
    "no all-reduce behind the column layers": patched(("parallel.collectives.all_reduce", lambda x, group: x)),
    "no sum in the reduce-scatter": patched(("parallel.collectives.reduce_scatter_tokens", own_share)),
    "gradients averaged over data ranks": patched(
        ("engine.fsdp.FSDPModule.set_gradient_divide_factor", lambda self, factor: None)
    ),
    "a replicated norm counted twice": patched(("engine.gradients.copies", lambda parameter: 1)),
    "tied gradients not summed": patched(("engine.local_model.LocalModel.sum_tied_gradients", lambda self: None)),
    "valid tokens counted on this rank only": patched(
        ("trainer.sum_over_world", lambda values, mesh: torch.tensor([float(value) for value in values]).double())
    ),
    "tokens come back in another order": patched(("model.moe.dispatch.inverse", lambda order_N: order_N)),
    "counts of this rank only": patched(
        ("model.moe.router.ExpertBalance.take_counts", lambda self: [one.step_counts for one in self.routers])
    ),
    "a router's gradient of this rank's tokens only": patched(
        ("model.moe.router.Sharding", SimpleNamespace(SPLIT_TOKENS=Sharding.REPLICATED))
    ),
    "load of this rank's tokens only": patched(("model.moe.router.over_tensor_ranks", lambda counts, tensor: counts)),
    "capacity of this rank's tokens only": patched(("model.moe.router.Router._of_all_tokens", only_own_choices)),
    "side losses without their factor": patched(
        ("engine.passes.side_losses_scaled_by", lambda factor, stages: side_losses_scaled_by(1.0, stages))
    ),
    "the outputs' bias added by every share": patched(("model.moe.dispatch.ExpertAxis.first_share", True)),
    "gradients of all tokens summed over the ranks": patched(
        ("parallel.tensor.all_tokens", lambda x, rank, group: gather_tokens(x, group))
    ),
    "no sum of queries' and keys' gradients": patched(
        (
            "parallel.tensor.TensorAxis.sum_for_all",
            lambda axis, x: x if axis.size == 1 else sum_over_ranks(x, axis.mesh.tensor.group),
        )
    ),
    "no state passed from run to run": patched(
        (
            "model.attention.metadata.Segments.state_before",
            lambda segments, kept_RX, added_RX: torch.zeros_like(added_RX),
        )
    ),
    "no tokens from the runs before": patched(
        ("model.attention.metadata.Segments.before", lambda segments, x, count: x.new_zeros(len(x), count, x.shape[2]))
    ),
    "own channels of the wrong rank": patched(
        ("parallel.tensor.TensorAxis.own_channels", lambda axis, x_BTD: x_BTD.chunk(axis.size, dim=-1)[0])
    ),
    "tiles by flash kernels": patched(
        ("model.attention.ring.ScoreScale.fuses", lambda scoring, query: scoring.softcap is None),
        ("model.attention.ring_plan.MIN_DOCUMENT", 2),
    ),
    "blocks merged without their log-sum-exp": patched(("model.attention.ring.merge", plain_mean)),
    "tokens numbered as if not zig-zag": patched(("parallel.context.TokenShares.own", as_if_contiguous)),
    "gradients of keys and values left where they are": patched(
        ("model.attention.ring.pass_on", lambda sent, axis, tag: Passing(sent, sent, []))
    ),
    "documents seen by each other": patched(("model.attention.ring_plan.visible_tokens", without_documents)),
    "sums of this rank's tokens only": patched(("parallel.context.TokenShares.sum", lambda shares, x: x)),
    "heads come back in another order": patched(
        ("model.attention.attention.exchange_tokens", lambda x, axis: exchange_tokens(x, axis).roll(x.shape[2], dims=2))
    ),
    "an output's gradient counted by every rank": patched(("parallel.tensor.count_once", lambda x, ranks: x)),
    "grouped products of experts": patched(("model.moe.mixture.uses_grouped", lambda x: True)),
    "tokens cut anywhere": patched(("model.layer_hook.CUT_TOKENS", 1)),
    "tokens cut anywhere, of another shard": patched(
        ("model.layer_hook.CUT_TOKENS", 1),
        (
            "model.layer_hook._last",
            lambda saved, cut, shards: saved.order.restored(saved.copy.values())[:, cut * shards :].contiguous(),
        ),
    ),
    "a swapped layer recomputed from its first tokens": patched(
        (
            "model.layer_hook._last",
            lambda saved, cut, shards: (
                saved.order.restored(saved.copy.values())
                .unflatten(1, (shards, -1))
                .flip(2)[:, :, cut:]
                .flip(2)
                .flatten(1, 2)
                .contiguous()
            ),
        )
    ),
    "weights of the step before": patched(("parallel.offload.weight_stream.WeightStream.release", lambda self: None)),
    "gradients in host memory not clipped": patched(
        ("engine.gradients.HostGradients.clip", lambda self, norm, max_norm: self.optimizer.to_host.finish())
    ),
    "logits normalized by this rank's sum": patched(("model.loss.over_ranks", lambda x, tensor, operation: x)),
}
