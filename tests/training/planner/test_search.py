"""The search: rankings of known cases, rejected layouts and their reasons, errors."""

from dataclasses import replace

import pytest
import yaml

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import LayoutConfig, OffloadConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.command import (
    PlanOptions,
    compare_recipe,
    make_request,
    plan_model,
    plan_recipe,
    recipe_text,
    resolve_layout,
)
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import FRAMEWORKS
from gristmill.training.planner.hardware import GIB, load_hardware
from gristmill.training.planner.layout import Layout, from_config
from gristmill.training.planner.layout_checks import validation_errors
from gristmill.training.planner.plan_report import explain, to_json
from gristmill.training.planner.plan_request import FixedChoices, PlanRequest, load_shape, named_shape
from gristmill.training.planner.search import Planner, min_gpus, nothing_fits, search, search_with_offload

SMALL = ModelConfig(layers=8, width=1024, heads=8, kv_heads=4, sequence_length=1024)


def test_a_layout_converts_to_a_recipe_and_back():
    for config in (
        LayoutConfig(data=4, replicate=2, tensor=2),
        LayoutConfig(pipeline=2, pipeline_schedule="interleaved", virtual_stages=2, tensor=2, data=2, recompute="full"),
        LayoutConfig(pipeline=2, pipeline_schedule="zbv"),
        LayoutConfig(data=2, context=4, context_method="all_to_all"),
        LayoutConfig(data=2, fsdp_reshard_after_forward="never"),
        LayoutConfig(data=2, pipeline=2, fsdp_reshard_after_forward="always", reduce_each_micro_batch=True),
    ):
        layout = from_config(config, 4)
        again = from_config(layout.config(), 4)
        assert again == layout


EXPERTS, MAMBA2 = {"experts": 8, "top_k": 2}, {"head_width": 64, "state": 16}


@pytest.mark.parametrize(
    ("model", "samples", "offload"),
    [
        ({}, 64, {}),
        ({"sequence_length": 8192}, 16, {"optimizer": "cpu"}),
        ({"moe": EXPERTS}, 64, {}),
        ({"mixer": "mamba2", "positions": "none", "mixers": {"mamba2": MAMBA2}}, 64, {}),
        ({}, 64, {"parameters": "host"}),
    ],
    ids=["dense", "long", "experts", "mamba2", "streamed"],
)
def test_every_ranked_layout_passes_the_check_of_the_recipe_it_prints(model, samples, offload):
    """What the engine does not compile is planned as eager; what is ranked, the engine's check accepts."""
    config = ModelConfig(**(SMALL.model_dump(exclude_unset=True) | {"sequence_length": 8192} | model))
    options = PlanOptions("h100", samples * config.sequence_length, offload=OffloadConfig(**offload))
    if offload.get("parameters"):
        options = replace(options, framework="gristmill-eager")
    plan = search(make_request(shape_of(config, 32000), 16, options))
    assert plan.ranked
    compiled = yaml.safe_load(recipe_text(plan))["train"]["compile"]
    assert compiled == (not offload.get("parameters"))
    for one in plan.ranked:
        layout = one.layout.config(one.split_points).model_copy(update={"offload": plan.request.offload})
        tokens = samples * config.sequence_length
        train = TrainConfig(tokens=tokens, batch_tokens=tokens, compile=compiled, layout=layout.model_dump())
        assert list(validation_errors(config, train, 32000, 16)) == []


def test_a_fixed_context_axis_has_compiled_layers():
    plan = search(make_request(shape_of(SMALL, 32000), 16, PlanOptions("h100", 64 * 1024), FixedChoices(context=2)))
    assert plan.best.layout.context == 2 and "compile: true" in recipe_text(plan)


def test_a_recipe_whose_batch_grows_is_planned_for_all_of_its_sizes():
    """The ramp begins with 8 samples, so no layout has more than 8 data ranks or larger micro-batches."""
    ramp = {"start_tokens": 8 * 1024, "increment_tokens": 8 * 1024, "over_tokens": 10**8}
    train = TrainConfig(tokens=10**9, batch_tokens=64 * 1024, batch_ramp=ramp)
    plan = plan_recipe(shape_of(SMALL, 32000), train, 16)
    assert plan.ranked and max(one.layout.data * one.layout.micro_batch for one in plan.ranked) == 8


PAPER = [
    ("gpt-1.7b", 32, 512, (1, 1, 16), 1.0),
    ("gpt-7.5b", 128, 512, (4, 1, 16), 0.88),
    ("gpt-39b", 512, 1536, (8, 2, None), 0.88),
    ("gpt-146b", 1536, 2304, (8, 8, None), 0.92),
    ("mt-nlg-530b", 2520, 2520, (8, 35, None), 0.95),
    ("gpt-1t", 3072, 3072, (8, 64, 1), 1.0),
]


@pytest.mark.parametrize(("name", "gpus", "samples", "paper", "near"), PAPER)
def test_layouts_of_the_paper_are_ranked_at_or_near_the_top(name, gpus, samples, paper, near):
    """arXiv 2104.04473, table 1, with the framework of its day. Where another wins, it has a smaller tensor axis or
    fewer stages: fewer collectives, or more data ranks, for a bubble that interleaving keeps small."""
    fixed = FixedChoices(recompute="full")
    plan = search(
        make_request(named_shape(name), gpus, PlanOptions("a100-80g", samples * 2048, framework="megatron-2021"), fixed)
    )
    own = next(f for f in plan.ranked if (f.layout.tensor, f.layout.pipeline) == paper[:2])
    assert own.tokens_per_second >= near * plan.best.tokens_per_second
    assert paper[2] in (None, own.layout.micro_batch)
    best = plan.best.layout
    assert near == 1.0 or best.tensor < paper[0] or best.pipeline < paper[1]


def test_the_530b_models_memory_by_hand():
    """docs/planning.md: a rank in the middle holds 3 layers over 8, 16 bytes a parameter: 28.1 GiB. The first has 139
    layer inputs of 83.9 MB at its peak, one layer at work (21 s b h) and the masks of the embedding's dropout."""
    request = make_request(
        named_shape("mt-nlg-530b"), 2520, PlanOptions("a100-80g", 2520 * 2048, framework="megatron-2021")
    )
    layout = Layout(8, 35, 9, 1, 1, 3, 1, "interleaved", "full")
    ranks = Planner(request).memory_by_rank(layout)
    state = ranks[17].parameters + ranks[17].gradients + ranks[17].optimizer
    assert state / GIB == pytest.approx(28.1, abs=0.1)
    sbh = 2048 * 20480
    assert ranks[0].activations == pytest.approx(139 * 2 * sbh + 21 * sbh - 2 * sbh + 139 / 3 * sbh)


def test_ranked_layouts_fit_and_are_sorted_by_throughput(hardware):
    plan = search(PlanRequest(shape_of(SMALL, 32000), hardware, 16, 64))
    speeds = [one.tokens_per_second for one in plan.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.memory.total <= 0.94 * hardware.device.memory_gib * GIB for one in plan.ranked)
    assert all(one.layout.gpus == 16 for one in plan.ranked)
    assert plan.num_candidates >= len(plan.ranked)


def test_fixed_choices_are_kept(hardware):
    fixed = FixedChoices(tensor=2, pipeline=2, micro_batch=2, recompute="full", schedule="1f1b")
    plan = search(PlanRequest(shape_of(SMALL, 32000), hardware, 8, 32, fixed=fixed))
    assert plan.ranked
    for one in plan.ranked:
        layout = one.layout
        assert (layout.tensor, layout.pipeline, layout.micro_batch, layout.recompute) == (2, 2, 2, "full")


def test_less_recomputation_is_never_slower(hardware):
    planner = Planner(PlanRequest(shape_of(SMALL, 32000), hardware, 8, 32))
    layout = Layout(tensor=2, shard=4, micro_batch=2, sequence_parallel=True)
    speeds = [
        planner.forecast(replace(layout, recompute=mode)).tokens_per_second
        for mode in ("none", "operators", "attention", "full")
    ]
    assert speeds[0] == max(speeds) and speeds[-1] == min(speeds)


def test_a_model_that_does_not_fit_names_the_minimum_number_of_gpus(hardware):
    request = PlanRequest(named_shape("gpt-1t"), hardware, 64, 64)
    plan = search(request)
    assert not plan.ranked
    with pytest.raises(RecipeError, match=r"no legal layout of 1008\.\d billion parameters fits 64 x a100-80g"):
        _ = plan.best
    count = min_gpus(request)
    assert count is not None and count > 64
    said = nothing_fits(plan)
    assert f"{count} GPUs are enough" in said and "--offload" in said


def test_the_memory_margin_is_left_free(hardware):
    """The fullest layout of a search with a margin of 30 % is leaner than of one with none."""
    shape, limit = shape_of(SMALL, 32000), hardware.device.memory_gib * GIB
    for margin in (0.0, 0.06, 0.3):
        plan = search(PlanRequest(shape, hardware, 2, 64, memory_margin=margin))
        fullest = max(one.memory.total for one in plan.ranked)
        assert fullest <= (1 - margin) * limit
    with pytest.raises(RecipeError, match=r"--memory-margin 1\.5: a share of the memory"):
        search(PlanRequest(shape, hardware, 2, 64, memory_margin=1.5))


def test_ranges_surround_the_forecast(hardware):
    best = search(PlanRequest(shape_of(SMALL, 32000), hardware, 8, 32)).best
    low, high = best.memory_range
    assert low < best.memory.total < high < 1.05 * best.memory.total
    slow, fast = best.tokens_per_second_range
    assert slow < best.tokens_per_second < fast


@pytest.mark.parametrize(
    ("gpus", "fixed", "said"),
    [
        (8, FixedChoices(tensor=7), "--tensor 7: 8 heads do not split evenly; legal for this model: [1, 2, 4, 8]"),
        (4, FixedChoices(tensor=8), "--tensor 8 = 8 GPUs, more than --gpus 4; use --gpus 8"),
        (8, FixedChoices(pipeline=3), "--pipeline 3 = 3 GPUs, which 8 is not a multiple of; use --gpus 9"),
        (8, FixedChoices(tensor=2, shard=3), "--tensor 2 x --shard 3 = 6 GPUs"),
        (64, FixedChoices(pipeline=64), "64 stages, but 8 layers"),
        (8, FixedChoices(micro_batch=7), "--micro-batch 7 does not divide 64 samples a step; try one of 1, 2, 4"),
    ],
)
def test_a_fixed_choice_without_a_legal_layout_is_named(hardware, gpus, fixed, said):
    with pytest.raises(RecipeError) as error:
        search(PlanRequest(shape_of(SMALL, 32000), hardware, gpus, 64, fixed=fixed))
    assert said in str(error.value)


def test_too_few_gpus_name_the_memory_that_is_needed(hardware):
    said = nothing_fits(search(PlanRequest(named_shape("gpt-1t"), hardware, 8, 64)))
    assert "the least memory, tensor 4 x data 2, " in said and "74.4 of its 79.2 GiB are usable" in said
    assert float(said.split("needs ")[-1].split(" GiB")[0].replace(",", "")) > 1000


def test_invalid_arguments_are_named(hardware):
    with pytest.raises(RecipeError, match="--gpus 0: at least one GPU"):
        make_request(named_shape("gpt-7.5b"), 0)
    with pytest.raises(RecipeError, match="did you mean gpt-146b"):
        named_shape("gpt-145b")
    with pytest.raises(RecipeError, match="no such framework"):
        make_request(named_shape("gpt-7.5b"), 8, PlanOptions(framework="deepspeed"))
    with pytest.raises(RecipeError, match="at least the sequence length"):
        search(make_request(named_shape("gpt-7.5b"), 8, PlanOptions(batch_tokens=100)))


def test_a_model_file(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("model: {layers: 4, width: 256, heads: 4, sequence_length: 512}\ntokenizer: {vocab_size: 4096}\n")
    shape = load_shape(str(path))
    assert (len(shape.blocks), shape.vocab, shape.sequence_length) == (4, 4096, 512)
    path.write_text("layers: 4\nwidth: 256\nheads: 4\nvocab_size: 1000\n")
    assert load_shape(str(path), sequence_length=128).sequence_length == 128
    path.write_text("model: {layers: 4, widht: 256, heads: 4}\ntokenizer: {vocab_size: 10}\n")
    with pytest.raises(RecipeError, match="unknown field widht; did you mean width"):
        load_shape(str(path))
    path.write_text("model: {layers: 4, width: 256, heads: 4}\n")
    with pytest.raises(RecipeError, match=r"no tokenizer\.vocab_size"):
        load_shape(str(path))


def test_auto_resolves_to_a_legal_layout():
    train = TrainConfig(tokens=10**9, batch_tokens=64 * 1024, compile=True, layout="auto")
    assert train.layout.auto
    chosen = resolve_layout(SMALL, 32000, train, 16)
    assert list(validation_errors(SMALL, chosen, 32000, 16)) == []
    assert not chosen.layout.auto and chosen.layout.world_size == 16 and chosen.layout.micro_batch
    assert chosen.layout.rank_order is None


def test_auto_rejects_a_batch_that_is_not_a_multiple_of_the_context():
    train = TrainConfig(tokens=10**9, batch_tokens=64 * 1024 + 1, layout="auto")
    with pytest.raises(RecipeError, match="not a multiple of the sequence length of 1024 tokens; try 65536"):
        resolve_layout(SMALL, 32000, train, 16)


def test_a_recipe_is_compared_with_the_best():
    train = TrainConfig(tokens=10**9, batch_tokens=64 * 1024, layout=LayoutConfig(tensor=8, data=2))
    plan = plan_recipe(shape_of(SMALL, 32000), train, 16)
    assert "slower than the best" in compare_recipe(plan, SMALL, train)
    assert "layout:" in recipe_text(plan)


def test_the_parts_of_the_report_add_up_to_the_totals(hardware):
    request = PlanRequest(shape_of(SMALL, 32000), hardware, 8, 32, tokens=10**10)
    plan = search(request)
    said = to_json(plan, top=3)
    first = said["layouts"][0]
    assert sum(s for part, s in first["seconds"].items() if part != "total" and not part.endswith("_overlap")) == (
        pytest.approx(first["seconds"]["total"])
    )
    assert sum(b for part, b in first["bytes"].items() if part != "total") == pytest.approx(first["bytes"]["total"])
    assert max(first["bytes_by_pipeline_rank"]) == pytest.approx(first["bytes"]["total"])
    assert first["bytes_sent"]["reduce"] >= 0
    assert first["days"] == pytest.approx(10**10 / first["tokens_per_second"] / 86400)
    assert first["price"] == pytest.approx(first["days"] * 24 * 8 * hardware.price_per_gpu_hour)
    assert explain(plan)


def test_offload_trades_memory_for_time(hardware):
    layout = Layout(shard=8, micro_batch=1)
    shape = named_shape("gpt-7.5b")
    kept, moved, interleaved = (
        Planner(PlanRequest(shape, hardware, 8, 8, offload=OffloadConfig(optimizer=strategy))).forecast(layout)
        for strategy in ("none", "cpu", "auto")
    )
    assert kept.memory.optimizer == pytest.approx(8 * 7.468e9 / 8, rel=0.001)
    assert moved.memory.optimizer == 0
    assert moved.memory.host == pytest.approx(16 * 7.468e9 / 8, rel=0.001)
    assert moved.memory.gradients == 0 and kept.memory.gradients == pytest.approx(4 * 7.468e9 / 8, rel=0.001)
    assert moved.time.optimizer > interleaved.time.optimizer > kept.time.optimizer
    assert moved.memory.total < interleaved.memory.total < kept.memory.total


def test_a_host_too_small_for_the_offloaded_state_is_the_reason(hardware):
    """7.5 billion parameters at 16 bytes over 8 GPUs: 13.9 GiB of host memory each."""
    small = hardware.model_copy(update={"host_memory_gib_per_gpu": 13.0})
    plan = search(PlanRequest(named_shape("gpt-7.5b"), small, 8, 8, offload=OffloadConfig(optimizer="cpu")))
    assert not plan.ranked
    assert any("13 GiB of host memory" in failure.reason for failure in plan.failures)


@pytest.mark.parametrize(
    ("name", "gpus", "optimizer", "parameters"),
    [("gpt-7.5b", 8, "none", "none"), ("gpt-18b", 4, "auto", "none"), ("gpt-7.5b", 1, "auto", "host")],
)
def test_offload_is_chosen_where_nothing_else_fits(name, gpus, optimizer, parameters):
    """16 bytes a parameter: 15 GB on each of 8 H100; 74 GB on each of 4, with the optimizer's state in host memory a
    part of that; 120 GB on one, where two layers of the weights fit."""
    options = PlanOptions("h100", 2048 * 8, framework="gristmill-eager")
    plan = search_with_offload(make_request(named_shape(name), gpus, options))
    assert (plan.request.offload.optimizer, plan.request.offload.parameters) == (optimizer, parameters)
    assert plan.best.memory.total <= plan.request.usable_bytes
    assert plan.best.memory.host <= plan.request.host_bytes
    assert any("in host memory" in sentence for sentence in explain(plan)) == (optimizer == "auto")
    assert ("parameters: host" in recipe_text(plan)) == (parameters == "host")


def test_compiled_layers_are_not_streamed():
    assert not search_with_offload(make_request(named_shape("gpt-7.5b"), 1, PlanOptions("h100", 2048 * 8))).ranked


def test_streamed_weights_cost_copies_that_larger_batches_hide(hardware):
    shape, layout = named_shape("gpt-7.5b"), Layout(micro_batch=1, recompute="full")
    seconds = {}
    for samples in (1, 8):
        for parameters in ("host", "disk"):
            offload = OffloadConfig(parameters=parameters)
            request = PlanRequest(shape, hardware, 1, samples, offload=offload)
            one = replace(layout, micro_batch=samples)
            seconds[parameters, samples] = Planner(request).forecast(one).time.total / samples
    assert seconds["host", 8] < seconds["host", 1] and seconds["disk", 8] < seconds["disk", 1] / 4
    assert seconds["host", 1] < seconds["disk", 1]


def test_scatter_gather_divides_sends_by_the_tensor_size(hardware):
    """arXiv 2104.04473, section 4.1: b s h / t crosses in place of b s h; 8 adapters carry an eighth each."""
    shape = named_shape("gpt3-175b")
    layout = Layout(tensor=8, pipeline=12, micro_batch=1, recompute="full")
    saving, whole = (
        Planner(PlanRequest(shape, hardware, 96, 24, framework=framework)).forecast(layout).time
        for framework in (
            FRAMEWORKS["megatron-2021"],
            FRAMEWORKS["megatron-2021"].model_validate(
                FRAMEWORKS["megatron-2021"].model_dump() | {"scatter_gather": False}
            ),
        )
    )
    assert saving.pipeline < whole.pipeline / 2
    assert saving.total < whole.total


def test_all_hardware_profiles_plan():
    for name in ("a100-80g", "h100", "h200"):
        plan = search(PlanRequest(named_shape("llama3-8b"), load_hardware(name), 8, 32))
        assert 0.3 < plan.best.mfu < 0.8
    assert divisors(6) == [1, 2, 3, 6]


def test_the_context_axis_is_ranked_by_both_methods():
    shape, options = named_shape("llama3-8b"), PlanOptions("h100", 64 * 8192)
    plan = search(make_request(shape, 16, options))
    assert {one.layout.context for one in plan.ranked} == {1, 2}  # a rank keeps 4096 of 8192 tokens
    asked = search(make_request(shape, 16, options, FixedChoices(context=2)))
    assert {one.layout.context for one in asked.ranked} == {2}
    assert {one.layout.context_method for one in asked.ranked} == {"ring", "all_to_all"}
    assert "context: 2" in recipe_text(asked)


def test_a_long_sample_is_divided_over_context_ranks():
    """262,144 tokens of an 8B model fit an 80 GB GPU of 16 in no layout without a context axis and tensor ranks."""
    shape, options = named_shape("llama3-8b", 262144), PlanOptions("h100", 16 * 262144)
    alone = FixedChoices(context=1, tensor=1, pipeline=1)
    assert not search(make_request(shape, 16, replace(options, framework="gristmill-eager"), alone)).ranked
    plan = plan_model(shape, 16, options, FixedChoices(tensor=1, pipeline=1))
    assert plan.best.layout.context > 1 and "compile: true" in recipe_text(plan)


def test_an_eager_recipe_is_planned_as_eager():
    recipe = load_recipe("gpt2_124m")
    plans = [
        plan_recipe(shape_of(recipe.model, 50304), recipe.train.model_copy(update={"compile": compiled}), 8)
        for compiled in (True, False)
    ]
    assert [plan.request.framework.name for plan in plans] == ["gristmill", "gristmill-eager"]
    assert plans[1].best.tokens_per_second < plans[0].best.tokens_per_second


def test_dualpipev_is_searched_when_it_is_fixed_and_is_never_faster_than_zbv():
    shape = named_shape("gpt-7.5b")
    plans = {
        name: plan_model(shape, 16, PlanOptions("h100", 256 * 2048), FixedChoices(pipeline=4, schedule=name))
        for name in ("zbv", "dualpipev")
    }
    assert plans["dualpipev"].best.layout.pipeline_schedule == "dualpipev"
    assert plans["zbv"].best.tokens_per_second >= plans["dualpipev"].best.tokens_per_second


def test_an_editor_knows_that_a_layout_may_be_left_to_the_planner():
    schema = TrainConfig.model_json_schema()["properties"]["layout"]
    assert {"const": "auto", "type": "string"} in schema["anyOf"]
    assert TrainConfig(tokens=1024, batch_tokens=1024, layout="auto").layout.auto


def test_operators_recompute_no_attention():
    shape = named_shape("llama3-8b", 65536)
    planner = Planner(make_request(shape, 8, PlanOptions("h100", 8 * 65536)))
    seconds, kept = {}, {}
    for method in ("ring", "all_to_all"):
        plain = Layout(context=8, micro_batch=1, context_method=method)
        again = replace(plain, recompute="operators")
        seconds[method] = planner.forecast(again).time.total - planner.forecast(plain).time.total
        kept[method] = planner.memory(again).activations
    attention = planner.forecast(Layout(context=8, micro_batch=1)).time.attention
    assert max(seconds.values()) < 0.05 * attention  # of which the forward pass is 1 of 3.5 parts
    assert kept["ring"] == kept["all_to_all"]


def test_a_pipeline_that_does_not_fit_reduces_each_micro_batch() -> None:
    """18 billion parameters on two stages of 4 A100: 9.1e9 unsharded fp32 sums alone would take 34 GiB."""
    shape = named_shape("gpt-18b")
    fixed = FixedChoices(tensor=1, pipeline=2, replicate=1, schedule="1f1b", micro_batch=1)
    plan = search(make_request(shape, 8, PlanOptions(hardware="a100-80g", batch_tokens=2**20), fixed))
    assert plan.ranked and all(one.layout.reduce_each for one in plan.ranked)
    planner, lean = Planner(plan.request), plan.best.layout
    whole = planner.memory(replace(lean, reduce_each=False)).buffers - planner.memory(lean).buffers
    assert whole == pytest.approx(4 * 9.1e9, rel=0.05)
    assert planner.memory(replace(lean, reduce_each=False)).total > planner.capacity
    copies = planner.memory(lean).buffers - planner.memory(replace(lean, reshard=True)).buffers
    assert copies == pytest.approx(2 * 9.1e9, rel=0.12)  # but for two layers and the ends
    sent = planner.forecast(lean).time, planner.forecast(replace(lean, reduce_each=False)).time
    assert sent[0].data > sent[1].data


def test_asynchronous_tensor_parallelism_hides_its_share(hardware) -> None:
    planner = Planner(PlanRequest(named_shape("gpt-7.5b"), hardware, 8, 8))
    layout = Layout(tensor=8, micro_batch=1, sequence_parallel=True)
    plain, hidden = (planner.forecast(replace(layout, async_tensor=each)).time for each in (False, True))
    assert plain.tensor_overlap == 0 and hidden.tensor_overlap > 0
    assert hidden.tensor + hidden.tensor_overlap == pytest.approx(plain.tensor)
    assert hidden.total < plain.total


def test_float8_halves_what_is_gathered(hardware) -> None:
    request = PlanRequest(named_shape("gpt-7.5b"), hardware, 8, 8, framework=FRAMEWORKS["gristmill-eager"])
    plain, float8 = (Planner(replace(request, float8=each)) for each in (False, True))
    layout = Layout(shard=8, micro_batch=1, recompute="full")
    layers = 7.3e9  # parameters of layers; two of 36 are gathered at once where weights are given up
    saved = plain.memory(layout).buffers - float8.memory(layout).buffers
    assert saved == pytest.approx(layers * (1 + 1 / 36 - 1 / 8), rel=0.05)
    gathers = [each.forecast(layout).time for each in (plain, float8)]
    total = [each.data + each.data_overlap for each in gathers]
    assert total[0] - total[1] == pytest.approx(layers * 7 / 8 / 234e9, rel=0.2)


@pytest.mark.parametrize(
    ("name", "fields", "error", "said"),
    [
        ("h100", {}, 0.12, None),
        ("h100", {"moe": EXPERTS}, 0.22, "within 22%; the busiest rank's experts are assumed to get 1.30 times"),
        ("h100", {"mixer": "mamba2", "positions": "none", "mixers": {"mamba2": MAMBA2}}, 0.22, "the mixer mamba2"),
        ("b200", {}, 0.29, "nine are within 29 %, GPT-OSS 120B is 71 % off"),
        ("x100", {}, 0.22, "No published run that was compared has the hardware x100: the range is the largest error"),
    ],
)
def test_a_forecast_says_what_supports_it(name, fields, error, said):
    model = ModelConfig(**(SMALL.model_dump(exclude_unset=True) | fields))
    request = make_request(shape_of(model, 32000), 8, PlanOptions("h100", 64 * 1024, imbalance=1.3))
    plan = search(replace(request, hardware=request.hardware.model_copy(update={"name": name})))
    assert plan.best.error == error
    low, high = plan.best.tokens_per_second_range
    assert low == pytest.approx(plan.best.tokens_per_second / (1 + error)) and high > plan.best.tokens_per_second
    assert any(said in sentence for sentence in explain(plan)) if said else True


def test_an_imbalance_below_the_mean_is_refused():
    with pytest.raises(RecipeError, match=r"--imbalance 0\.5: the busiest rank's rows over the mean; give 1 or more"):
        search(make_request(shape_of(SMALL, 32000), 8, PlanOptions("h100", 64 * 1024, imbalance=0.5)))
