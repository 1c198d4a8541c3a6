"""Layers' weights in host memory or on disk: the same bits as weights on the device, and two layers at a time."""

import pytest
import torch

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import BatchSize, generate
from gristmill.evaluation.inference.load_model import load_for_evaluation, load_for_evaluation_sharded
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.training.checkpoint.checkpoint import load_model
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.parallel.mesh import build_mesh, local

PROMPTS = [[256, 1, 2, 3], [256, 9], [256, 1, 2, 3, 4, 5, 6]]


def answers(loaded):
    """Hidden states of one pass, and tokens of three requests in two slots."""
    model = loaded.causal_lm
    with torch.inference_mode():
        hidden = model.hidden(torch.arange(24).view(2, 12))
        logits = model.head(hidden.flatten(0, 1))
    made = generate(model, loaded.tokenizer, PROMPTS, GenerationSettings(8), BatchSize(2 * 16))
    return hidden, logits, [each.tokens for each in made]


def has_weights(layer):
    return any(each.untyped_storage().nbytes() for each in layer.parameters())


def assert_same_bits(found, expected):
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2] == expected[2]


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "experts"])
def test_streamed_is_resident_bit_by_bit(place, precision, family, random_checkpoint, tokenizer_folder):
    paths = CheckpointPaths(random_checkpoint(family, layers=6), tokenizer_folder)
    resident = load_for_evaluation(paths, EvaluateConfig(precision=precision))
    streamed = load_for_evaluation(paths, EvaluateConfig(precision=precision, offload_parameters=place))
    layers = list(streamed.causal_lm.model.layers.values())
    held: list[int] = []
    for layer in layers:
        layer.mixer.register_forward_hook(lambda *_: held.append(sum(map(has_weights, layers))))
    assert_same_bits(answers(streamed), answers(resident))
    assert max(held) == 2
    assert streamed.digest == resident.digest and "at most 2 layers'" in streamed.memory_note


def test_a_folder_of_transformers_is_streamed(random_checkpoint, tokenizer_folder, tmp_path):
    write_huggingface(tmp_path / "out", load_model(random_checkpoint(layers=4))[0], 256, tokenizer_folder)
    paths = CheckpointPaths(tmp_path / "out")
    resident = load_for_evaluation(paths, EvaluateConfig())
    assert_same_bits(answers(load_for_evaluation(paths, EvaluateConfig(offload_parameters="disk"))), answers(resident))


def answers_of_ranks(paths, layout):
    """This rank's answers with weights as they are and on disk, and the bytes of its store."""
    mesh = build_mesh(layout, 2, torch.device("cpu"))
    found = []
    for place in ("none", "disk"):
        loaded = load_for_evaluation_sharded(paths, EvaluateConfig(offload_parameters=place), layout, mesh)
        found.append(answers(loaded))
    whole = sum(each.numel() for layer in loaded.causal_lm.model.layers.values() for each in layer.parameters())
    own = sum(local(each).numel() for layer in loaded.causal_lm.model.layers.values() for each in layer.parameters())
    return *found, own / whole


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_each_rank_reads_its_share(axis, random_checkpoint, tokenizer_folder, pool):
    paths = CheckpointPaths(random_checkpoint(layers=6, width=64), tokenizer_folder)
    layout = LayoutConfig(**{axis: 2}, sequence_parallel=False)
    for resident, streamed, share in pool.run(2, answers_of_ranks, paths, layout):
        assert_same_bits(streamed, resident)
        assert share < 0.51 if axis == "tensor" else share == 1
