"""Random models, layouts and policies: what the checks accept takes two steps on gloo; what they refuse, they refuse
with a reason and a fix. The planner's search decides likewise."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.engine_profile import FRAMEWORKS
from gristmill.training.planner.hardware import load_hardware
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.layout_checks import micro_batch_size, reasons_of, validation_errors
from gristmill.training.planner.plan_request import PlanRequest
from tests.support.forked_pool import ForkedPool, RankFailed
from tests.support.parity import MODELS, STEPS, Case, mesh_of_group, outcome

SAMPLES, CONTEXT = 8, 16
# What a refusal says to do.
FIX = re.compile(
    r"\b(set|use|try|leave|give|lower|raise|change|start|legal for this model|use at most|must (lie|be|come))\b"
)


@dataclass(frozen=True)
class Triple(Case):
    """A parity case with any fields of the training."""

    sizes: tuple[tuple[str, Any], ...] = ()
    train: tuple[tuple[str, Any], ...] = ()

    @property
    def fields(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of model and training, before they are validated."""
        layers = 4 if self.layout["pipeline"] > 1 else 2
        model = {
            "width": 32,
            "heads": 4,
            "kv_heads": 2,
            "sequence_length": CONTEXT,
            "ffn_hidden_size": 48,
            "layers": layers,
        }
        train = {"tokens": 2 * STEPS * SAMPLES * CONTEXT, "batch_tokens": SAMPLES * CONTEXT, "z_loss": 1e-2}
        train["layout"] = self.layout
        return model | MODELS[self.model] | dict(self.sizes), train | dict(self.train)

    @property
    def configs(self) -> tuple[ModelConfig, TrainConfig]:
        model, train = self.fields
        return ModelConfig(**model), TrainConfig(**train)


def drawn_layout(draw: Random, has_experts: bool) -> dict[str, Any]:
    """Of up to four processes, on one axis or two."""
    sizes = draw.choice([(1,), (2,), (2,), (3,), (4,), (2, 2), (2, 2)])
    layout = {"data": 1, "pipeline": 1, "tensor": 1, "context": 1} | dict(
        zip(draw.sample(["data", "pipeline", "tensor", "context"], len(sizes)), sizes, strict=True)
    )
    stage = layout["data"] * layout["tensor"] * layout["context"]
    layout["micro_batch"] = draw.choice([0, 1, 1, 1, 2, 2, 3])
    layout["pipeline_schedule"] = draw.choice(["1f1b", "1f1b", "interleaved", "zbv", "gpipe", "dualpipev"])
    layout["context_method"] = draw.choice(["ring", "all_to_all"])
    layout["recompute"] = draw.choice(["none", "none", "full", "attention", "operators", "swap", "tokens"])
    offload = draw.choice([{"optimizer": "cpu"}, {"optimizer": "auto"}, {"parameters": "host"}])
    rare = {
        "replicate": (2, layout["data"]),
        "expert": (2 if has_experts else 40, stage),
        "expert_tensor": (6 if has_experts else 40, stage),
        "sequence_parallel": (4, False),
        "async_tensor_parallel": (3 if layout["tensor"] > 1 else 40, True),
        "fsdp_reshard_after_forward": (6, draw.choice(["always", "never"])),
        "reduce_each_micro_batch": (6, True),
        "num_layers_on_device": (3, 0),
        "offload": (6, offload),
        "offloaded_token_fraction": (1 if layout["recompute"] == "tokens" else 40, 0.5),
    }
    return layout | {name: value for name, (every, value) in rare.items() if draw.randrange(every) == 0}


def drawn_triple(drawn: int, index: int) -> Triple:
    """A model of the parity tests with other sizes, a layout, and how it is trained."""
    draw = Random(f"{drawn} {index}")
    name = draw.choice(sorted(set(MODELS) - {"bert", "bert_deep", "bert_original"}))
    sizes = {"width": (12, 48), "ffn_hidden_size": (12, 50), "heads": (12, 3)}
    ramp = {"start_tokens": 4 * CONTEXT, "increment_tokens": 4 * CONTEXT, "over_tokens": 16 * CONTEXT}
    train = {"float8": (20, True), "cuda_graphs": (20, True), "compile": (20, True), "batch_ramp": (10, ramp)}
    precision, optimizer = draw.choice(["fp32", "bf16", "fp64"]), draw.choice(["adamw", "adamw", "muon"])
    rare = [
        tuple((field, value) for field, (every, value) in fields.items() if draw.randrange(every) == 0)
        for fields in (sizes, train)
    ]
    return Triple(
        drawn_layout(draw, "moe" in MODELS[name]),
        name,
        vocab=draw.choice([51, 51, 51, 64, 2]),
        sizes=rare[0],
        train=(("precision", precision), ("optimizer", {"name": optimizer, "learning_rate": 1e-3}), *rare[1]),
    )


def refusals(triple: Triple) -> list[str]:
    """Of the configuration's validators, or of the checks."""
    try:
        model, train = triple.configs
    except ValidationError as error:
        return [reasons_of(error)]
    return list(validation_errors(model, train, triple.vocab, train.layout.world_size))


def planner_refuses(triple: Triple) -> bool:
    """Whether the search refuses the same layout. It says nothing of fields that it leaves as they are."""
    model, train = triple.configs
    samples = train.batch_tokens // model.sequence_length
    request = PlanRequest(
        shape_of(model, triple.vocab),
        load_hardware("h100"),
        train.layout.world_size,
        samples,
        framework=FRAMEWORKS["gristmill" if train.compile else "gristmill-eager"],
        offload=train.layout.offload,
        train=train,
    )
    return request.illegal_reason(from_config(train.layout, micro_batch_size(model, train))) is not None


def steps_on_this_rank(triple: Triple) -> list[float]:
    return outcome(triple, mesh_of_group(*triple.configs)).losses


def runs_on_this_machine(train: TrainConfig) -> bool:
    """float8 products and CUDA graphs need a GPU; compiled layers take many seconds to build."""
    return not (train.float8 or train.cuda_graphs or train.compile)


def check_triple(triple: Triple, pool: ForkedPool) -> str:
    """What became of it: refused, accepted (which this machine cannot run), or ran."""
    reasons = refusals(triple)
    for reason in reasons:
        assert FIX.search(reason), f"no fix: {reason}"
    try:
        _, train = triple.configs
    except ValidationError:
        return "refused"
    assert planner_refuses(triple) == bool(reasons), reasons
    if reasons or not runs_on_this_machine(train):
        return "refused" if reasons else "accepted"
    ranks = pool.run(train.layout.world_size, steps_on_this_rank, triple, timeout_seconds=60)
    assert all(math.isfinite(loss) for losses in ranks for loss in losses)
    assert all(losses == pytest.approx(ranks[0], rel=1e-6) for losses in ranks)
    return "ran"


def check_triples(pool: ForkedPool, drawn: int, count: int) -> Counter[str]:
    """Those of one number of processes follow each other, so that they share a process group. The message of a failure
    has the number with which drawn_triple draws it again."""
    triples = [
        (math.prod(triple.layout[axis] for axis in ("data", "pipeline", "tensor", "context")), index, triple)
        for index in range(count)
        for triple in [drawn_triple(drawn, index)]
    ]
    outcomes: Counter[str] = Counter()
    failures = []
    for _, index, triple in sorted(triples, key=lambda each: each[:2]):
        try:
            outcomes[check_triple(triple, pool)] += 1
        except (AssertionError, RankFailed) as error:
            failures.append(f"drawn_triple({drawn}, {index}) = {triple}\n{error}")
    print(f"seed {drawn}: {dict(outcomes)}, {len(failures)} failed")
    assert not failures, "\n\n".join(failures)
    return outcomes


def test_what_is_accepted_runs_and_what_is_refused_says_how_to_fix_it(pool: ForkedPool) -> None:
    outcomes = check_triples(pool, 47, 40)
    assert outcomes["ran"] >= 15 and outcomes["refused"] >= 15


@pytest.mark.slow
def test_a_thousand_other_triples(pool: ForkedPool) -> None:
    """A new seed each time; the message of a failure has it."""
    assert check_triples(pool, SystemRandom().randrange(10**6), 1000).total() == 1000
