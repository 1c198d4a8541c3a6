"""Mamba-2 and hybrids over ranks are the model of one process: losses, every gradient, the norm and parameters after
steps, in float64 to 1e-12."""

from typing import Any
from unittest import mock

import pytest
import torch

from gristmill.training.model.ssm.mamba2 import Mamba2Mixer, Scan
from tests.support.parity import Case, by_size, differences, mesh_of_group, outcome

PP2 = {"pipeline": 2, "micro_batch": 4}
SOME_TOKENS = {"recompute": "tokens", "offloaded_token_fraction": 0.3, "num_layers_on_device": 0}
CUBE = PP2 | {"data": 2, "tensor": 2}
GRID = [
    Case({"data": 1, "micro_batch": 2}, "mamba2"),
    Case({"tensor": 2, "micro_batch": 8}, "mamba2"),
    Case({"data": 2, "tensor": 2}, "hybrid", documents=True),
    Case({"tensor": 2, "micro_batch": 8, "recompute": "attention"}, "mamba2"),
    Case({"data": 2, "expert": 2}, "hybrid_experts"),
    Case({"data": 2}, "tcnca", documents=True),
    Case({"tensor": 2, "micro_batch": 8, "sequence_parallel": False}, "tcnca_post"),
    Case({"data": 2, "recompute": "full"}, "three_mixers"),
    # the context axis: states passed from run to run, halos of convolutions and chunks
    Case({"context": 2}, "mamba2"),
    Case({"context": 2}, "tcnca", documents=True),
    Case({"context": 2}, "three_mixers", documents=True),
    # latent attention: heads over tensor ranks, narrow projections on each of them; the ring
    Case({"tensor": 2, "micro_batch": 8}, "latent"),
    Case({"context": 2}, "latent", documents=True),
    # activations of some tokens in host memory, the others recomputed around convolutions, scans and attention
    Case({"tensor": 2, "micro_batch": 8, "sequence_parallel": False} | SOME_TOKENS, "three_mixers"),
    # by operator: a pipeline stage keeps whole weights, tensor ranks gather tokens, a group of one shards nothing
    Case(PP2 | {"recompute": "operators"}, "hybrid", documents=True),
    Case({"tensor": 2, "micro_batch": 8, "recompute": "operators"}, "hybrid", documents=True),
    Case({"data": 2, "replicate": 2, "recompute": "operators"}, "hybrid"),
]
# further pairs of the same parts, by hand (-m slow)
RARE = [
    Case(PP2 | {"pipeline_schedule": "interleaved"}, "hybrid"),
    Case({"tensor": 4, "micro_batch": 8}, "tcnca_simple", documents=True),
    Case(PP2 | {"pipeline_schedule": "interleaved"}, "tcnca"),
    Case(CUBE | {"pipeline_schedule": "zbv"}, "three_mixers", documents=True),
    Case({"context": 4}, "tcnca", documents=True),
    Case(PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "three_mixers"),
    Case({"tensor": 4, "micro_batch": 8}, "mamba2", documents=True),
    Case({"data": 2, "recompute": "full"}, "hybrid"),
    Case(PP2 | {"pipeline_schedule": "zbv"}, "hybrid"),
    Case(PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "mamba2"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}, "hybrid", documents=True),
    Case({"context": 2, "context_method": "all_to_all", "tensor": 2}, "three_mixers", documents=True),
    Case({"context": 2} | PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "three_mixers"),
    Case({"data": 2}, "mamba2"),
    Case({"tensor": 4, "micro_batch": 8, "sequence_parallel": False}, "latent", documents=True),
    Case({"context": 2, "tensor": 2}, "latent"),
    Case(PP2 | {"pipeline_schedule": "zbv", "recompute": "full"}, "latent"),
    Case({"data": 2, "tensor": 2, "recompute": "attention"}, "latent", optimizer="muon"),
    Case({"context": 2, "context_method": "all_to_all"}, "latent", documents=True),
    Case({"data": 2, "recompute": "operators"}, "latent"),
    Case({"data": 2, "recompute": "swap"}, "latent"),
    Case(CUBE | {"pipeline_schedule": "interleaved"}, "latent"),
    Case({"tensor": 2, "micro_batch": 8, "sequence_parallel": False}, "hybrid"),
    Case({"data": 4, "replicate": 2}, "hybrid"),
    Case({"data": 2, "recompute": "operators"}, "hybrid"),
    Case(PP2, "mamba2"),
    Case(PP2 | {"tensor": 2, "pipeline_schedule": "zbv", "micro_batch": 8}, "mamba2"),
    Case({"tensor": 2, "micro_batch": 8}, "mamba2", optimizer="muon"),
    Case({"tensor": 2, "micro_batch": 8}, "tcnca"),
    Case({"tensor": 2, "micro_batch": 8, "recompute": "attention"}, "tcnca_simple"),
    Case({"context": 2, "tensor": 2}, "tcnca_simple"),
    Case({"context": 2, "data": 2, "recompute": "attention"}, "mamba2", documents=True),
    Case({"context": 2} | SOME_TOKENS, "three_mixers", documents=True),
    Case({"data": 2, "expert": 2} | SOME_TOKENS, "hybrid_experts"),
    Case({"tensor": 2, "micro_batch": 8, "sequence_parallel": False} | SOME_TOKENS, "latent"),
]


@pytest.mark.parametrize("case", by_size(GRID, RARE))
def test_every_layout_of_mixers_is_one_process(case: Case, pool: Any) -> None:
    found = differences(case, pool)
    assert max(found.values()) < 1e-12, found


def dtypes_in_forward(case: Case) -> set[tuple[torch.dtype, ...]]:
    """Of A_log, the convolution's taps and the tokens, while a step runs."""
    seen, forward = set(), Mamba2Mixer.forward
    scan = Scan.forward

    def recorded(mixer: Mamba2Mixer, x_BTD: torch.Tensor, *rest: Any) -> Any:
        def recorded_scan(module: Scan, *arguments: Any) -> Any:
            seen.add((module.A_log.dtype, mixer.x_convolution.weight.dtype, x_BTD.dtype))
            return scan(module, *arguments)

        with mock.patch.object(Scan, "forward", recorded_scan):
            return forward(mixer, x_BTD, *rest)

    with mock.patch.object(Mamba2Mixer, "forward", recorded):
        outcome(case, mesh_of_group(*case.configs))
    return seen


def test_parameters_declared_fp32_are_not_cast(pool: Any) -> None:
    for seen in pool.run(2, dtypes_in_forward, Case({"data": 2}, "mamba2", precision="bf16")):
        assert seen == {(torch.float32, torch.bfloat16, torch.bfloat16)}


CONTROLS = [
    ("no sum in the reduce-scatter", Case({"tensor": 2, "micro_batch": 8}, "mamba2"), "gradients"),
    ("no sum of queries' and keys' gradients", Case({"tensor": 2, "micro_batch": 8}, "tcnca"), "gradients"),
    ("no state passed from run to run", Case({"context": 2}, "mamba2"), "gradients"),
    ("no tokens from the runs before", Case({"context": 2}, "tcnca"), "gradients"),
    ("own channels of the wrong rank", Case({"tensor": 2, "micro_batch": 8}, "tcnca_simple"), "loss"),
    ("gradients averaged over data ranks", Case({"data": 2}, "hybrid"), "gradients"),
    ("a replicated norm counted twice", Case({"tensor": 2, "micro_batch": 8}, "hybrid"), "norm"),
    (
        "a swapped layer recomputed from its first tokens",
        Case({"tensor": 2, "micro_batch": 8, "sequence_parallel": False} | SOME_TOKENS, "three_mixers"),
        "gradients",
    ),
]


@pytest.mark.parametrize(("mutation", "case", "quantity"), CONTROLS, ids=[control[0] for control in CONTROLS])
def test_a_broken_mixer_is_caught(mutation: str, case: Case, quantity: str, pool: Any) -> None:
    assert differences(case, pool, mutation)[quantity] > 1e-6
