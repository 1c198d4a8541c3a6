"""Bytes per axis equal what the engine sends."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import GradientAccumulation, PipelineSchedule
from gristmill.training.model.attention import ring as ring_attention
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel import context
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.engine_profile import GRISTMILL, MEGATRON_2021
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.network import (
    context_volume,
    data_volumes,
    ends_tensor_volume,
    pipeline_volume,
    tensor_volume,
)
from gristmill.training.planner.plan_request import named_shape

MODEL = ModelConfig(layers=3, width=64, heads=4, kv_heads=4, sequence_length=32)
VOCAB = 128


@pytest.fixture
def sent(monkeypatch) -> Counter:
    """Ring bytes of this rank, by collective, while the test runs."""
    counted: Counter = Counter()

    def watch(name, ring):
        original = getattr(dist, name)

        def counting(*tensors, group=None, **options):
            size = dist.get_world_size(group)
            counted[name] += ring(size, (*tensors, *(v for v in options.values() if isinstance(v, torch.Tensor))))
            return original(*tensors, group=group, **options)

        monkeypatch.setattr(dist, name, counting)

    def share(size, tensor):
        return tensor.numel() * tensor.element_size() * (size - 1) / size

    watch("all_reduce", lambda size, tensors: 2 * share(size, tensors[0]))
    watch("all_gather_into_tensor", lambda size, tensors: share(size, tensors[0]))
    watch("all_gather_single", lambda size, tensors: share(size, tensors[0]))
    watch("reduce_scatter_tensor", lambda size, tensors: share(size, tensors[1]))
    watch("reduce_scatter_single", lambda size, tensors: share(size, tensors[1]))
    watch("all_to_all_single", lambda size, tensors: share(size, tensors[1]))  # a reduce-scatter on CPUs
    return counted


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "attention", "operators"])
def test_the_tensor_axis_sends_what_the_engine_sends(sent, fake_process, tensor, sequence_parallel, recompute):
    layout = LayoutConfig(tensor=tensor, sequence_parallel=sequence_parallel, recompute=recompute)
    with fake_process(tensor, 0):
        mesh = build_mesh(layout, MODEL.num_kv_heads, torch.device("cpu"))
        part = Transformer(MODEL, VOCAB, mesh, layout).to_empty(device="cpu")
        tokens = torch.zeros(2, MODEL.sequence_length, dtype=torch.int64)
        part.output = causal_loss()
        part(tokens, tokens=tokens, targets=tokens, weights=torch.ones(2, MODEL.sequence_length))[:, 0].sum().backward()
    shape = shape_of(MODEL, VOCAB)
    planned = from_config(layout, 2)
    forecast = tensor_volume(shape, planned, 2, GRISTMILL, layers=3, compute_bytes=4)
    forecast += ends_tensor_volume(shape, planned, 2, compute_bytes=4)
    assert sum(sent.values()) == forecast


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("recompute", ["none", "full", "attention", "operators"])
def test_the_context_axis_sends_what_the_engine_sends(monkeypatch, fake_process, method, recompute):
    layout, sent = LayoutConfig(context=4, context_method=method, recompute=recompute), []

    def exchange(received, whole, group):
        sent.append(whole.numel() * 4 * 3 / 4)

    def pass_on(tensor, axis, tag=0):
        sent.append(tensor.numel() * 4)
        return context.Passing(tensor, tensor, [])

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(context, "pass_on", pass_on)
    monkeypatch.setattr(ring_attention, "pass_on", pass_on)
    with fake_process(4, 0):
        mesh = build_mesh(layout, MODEL.num_kv_heads, torch.device("cpu"))
        part = Transformer(MODEL, VOCAB, mesh, layout).to_empty(device="cpu")
        tokens = torch.zeros(2, MODEL.sequence_length, dtype=torch.int64)
        part.output = causal_loss()
        part(tokens, tokens=tokens, targets=tokens, weights=torch.ones(2, MODEL.sequence_length))[:, 0].sum().backward()
    forecast = context_volume(shape_of(MODEL, VOCAB), from_config(layout, 2), 2, layers=3, compute_bytes=4)
    assert sum(sent) == forecast


@pytest.mark.parametrize("reshard, reduces_each", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_data_axis_sends_what_fsdp_sends(sent, fake_process, reshard, reduces_each, micro_batch):
    """bf16 weights and fp32 gradients; ZeRO-3 gathers the layers once more than ZeRO-2, not the ends."""
    layout = LayoutConfig(
        data=4,
        micro_batch=micro_batch,
        fsdp_reshard_after_forward="always" if reshard else "never",
        reduce_each_micro_batch=reduces_each,
    )
    with fake_process(4, 0):
        mesh = build_mesh(layout, MODEL.num_kv_heads, torch.device("cpu"))
        train = TrainConfig(tokens=1, batch_tokens=1, layout=layout)
        parts = build_local_model(MODEL, VOCAB, train, mesh, 0).stages
        sent.clear()
        batch = {
            "tokens": torch.zeros(2, MODEL.sequence_length, dtype=torch.int64),
            "targets": torch.zeros(2, MODEL.sequence_length, dtype=torch.int64),
            "weights": torch.ones(2, MODEL.sequence_length),
        }
        GradientAccumulation(parts[0], micro_batch, causal_loss(), reduces_each).train(batch, [1.0])
    shape, planned = shape_of(MODEL, VOCAB), from_config(layout, micro_batch)
    ends = (2 * VOCAB + 1) * MODEL.width
    reduce, gather = data_volumes(parameter_count(shape), planned, 8, GRISTMILL, ends)
    assert (sent["all_to_all_single"], sent["all_gather_single"]) == (reduce, gather)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_stage_hands_on_what_the_engine_hands_on(fake_process, sequence_parallel):
    """The tensor that crosses from stage to stage, twice: forward, and its gradient back."""
    layout = LayoutConfig(tensor=2, pipeline=2, sequence_parallel=sequence_parallel, micro_batch=2)
    with fake_process(4, 0):
        mesh = build_mesh(layout, MODEL.num_kv_heads, torch.device("cpu"))
        part = Transformer(MODEL, VOCAB, mesh, layout, options=ComputeOptions(torch.bfloat16))
        crossing = PipelineSchedule({0: part}, layout, mesh, 2, causal_loss())._boundary(
            torch.Size((2, MODEL.sequence_length))
        )
    forecast = pipeline_volume(shape_of(MODEL, VOCAB), from_config(layout, 2), 2, GRISTMILL)
    assert 2 * crossing.numel() * crossing.element_size() == forecast


def test_scatter_gather_sends_an_eighth():
    """GPT-3 on 12 stages of 8 ranks, one sample: 2048 x 12288 x 2 bytes each way, 6.3 MB for each adapter with it."""
    layout = Layout(tensor=8, pipeline=12, micro_batch=1)
    shape = named_shape("gpt3-175b")
    without = MEGATRON_2021.model_validate(MEGATRON_2021.model_dump() | {"scatter_gather": False})
    assert pipeline_volume(shape, layout, 1, without) == 2 * 2048 * 12288 * 2
    assert pipeline_volume(shape, layout, 1, MEGATRON_2021) == 2 * 2048 * 12288 * 2 / 8
    turns = replace(layout, virtual=4, pipeline_schedule="interleaved")
    assert pipeline_volume(shape, turns, 1, MEGATRON_2021) == 4 * pipeline_volume(shape, layout, 1, MEGATRON_2021)
