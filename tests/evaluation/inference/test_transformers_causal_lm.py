"""Models of transformers that gristmill's own model does not have: batched generation is that of transformers alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.evaluation.convert.huggingface import has_family
from gristmill.evaluation.import_export import import_checkpoint
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.prompts import BatchSize, generate
from gristmill.evaluation.inference.load_model import LoadedModel, load_for_evaluation, load_for_evaluation_sharded
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.transformers_causal_lm import TransformersCausalLM, load_transformers_causal_lm
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.auto_tp.plan import CollectiveCounter
from gristmill.training.auto_tp.transformers_folder import open_causal_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.parallel.mesh import build_mesh, single_process
from tests.support.transformers_models import VOCABULARY, tiny_model


class Numbers:
    """Token i is the word `i `; the last ends a document."""

    end_of_document = VOCABULARY - 1
    ends = (VOCABULARY - 1,)

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture(params=["mpt", "cohere", "mamba"])
def causal_lm(request, tmp_path: Path) -> TransformersCausalLM:
    """Two whose keys and values are kept, and Mamba, whose state is not."""
    tiny_model(request.param).save_pretrained(tmp_path)
    assert not has_family(tmp_path)
    found, _ = load_transformers_causal_lm(open_causal_folder(tmp_path), single_process(), torch.float32, VOCABULARY)
    assert found.keeps_keys == (request.param != "mamba")
    return found


def greedy(causal_lm: TransformersCausalLM, prompt: list[int], number: int) -> list[int]:
    """One token after another by the whole model."""
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(int(causal_lm.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == Numbers.end_of_document:
            break
    return [token for token in tokens[len(prompt) :] if token != Numbers.end_of_document]


def test_a_batch_generates_as_each_prompt_alone(causal_lm: TransformersCausalLM) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY - 1, length).tolist() for length in (3, 9, 5, 12, 4)]
    batch = ContinuousBatch(causal_lm, Numbers(), BatchLimits(2))
    numbers = [
        batch.add(GenerationRequest(tuple(prompt), GenerationSettings(6 + index)))
        for index, prompt in enumerate(prompts)
    ]
    found = {}
    while not batch.is_idle:
        found |= {result.number: result for result in batch.step()}
    for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        expected = Numbers().decode(greedy(causal_lm, prompt, 6 + index))
        assert found[number].generations[0].text == expected


def test_a_tree_of_continuations_is_refused(causal_lm: TransformersCausalLM) -> None:
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RecipeError, match="no tree"):
        causal_lm.hidden(tokens, tokens, torch.ones(1, 2, 2, dtype=torch.bool))


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
PROMPTS = [[256, 1, 2, 3], [256, 9], [256, 1, 2, 3, 4, 5, 6]]


@pytest.fixture
def folder(tmp_path: Path, tokenizer_folder: Path):
    """Writes a family's tiny model, whose vocabulary has rows of padding, as a folder with a tokenizer."""

    def write(family: str, **fields) -> CheckpointPaths:
        model = tiny_model(family, **{"vocab_size": 300, "eos_token_id": 256, "bos_token_id": None, **fields})
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.get_output_embeddings().weight.data[257:] *= 10  # what no tokenizer knows is likeliest
        model.save_pretrained(tmp_path / "model")
        return CheckpointPaths(tmp_path / "model", tokenizer_folder)

    return write


def tokens_of(loaded: LoadedModel) -> list[list[int]]:
    return [
        list(each.tokens)
        for each in generate(loaded.causal_lm, loaded.tokenizer, PROMPTS, GenerationSettings(6), BatchSize(100))
    ]


def of_two_ranks(paths: CheckpointPaths, axis: str) -> tuple[str, int, list[list[int]]]:
    """The note, the collectives of a pass, and the tokens."""
    layout = LayoutConfig(**{axis: 2}, sequence_parallel=False)
    loaded = load_for_evaluation_sharded(paths, EvaluateConfig(), layout, build_mesh(layout, 2, torch.device("cpu")))
    counter = CollectiveCounter()
    with torch.inference_mode(), counter:
        loaded.causal_lm.hidden(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    return loaded.note, counter.total, tokens_of(loaded)


@pytest.mark.parametrize(("family", "axis"), [("mpt", "tensor"), ("llama", "tensor"), ("llama", "pipeline")])
def test_two_ranks_generate_as_one(family: str, axis: str, folder, pool) -> None:
    """By transformers' code under a plan by rules, and a folder of our families by our own model."""
    paths = folder(family)
    expected = tokens_of(load_for_evaluation(paths, EvaluateConfig()))
    for note, collectives, found in pool.run(2, of_two_ranks, paths, axis):
        assert found == expected
        assert family != "mpt" or collectives == 5 + 1  # the plan's, and the gathered logits
        assert ("MptForCausalLM runs with transformers' code" in note) == (family == "mpt")
        assert ("collectives forward" in note) == (family == "mpt")


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_rows_of_padding_are_never_generated(family: str, folder) -> None:
    loaded = load_for_evaluation(folder(family), EvaluateConfig())
    assert max(max(each) for each in tokens_of(loaded)) <= 256


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_padding_counts_in_the_sum_of_the_softmax(family: str, folder) -> None:
    """As in lm-eval's HFLM, of prompts too."""
    loaded = load_for_evaluation(folder(family), EvaluateConfig())
    tokens = torch.tensor([[256, 1, 2, 3]])
    logits = loaded.causal_lm.head(loaded.causal_lm.hidden(tokens)[0])
    assert logits.shape == (4, 300)
    expected = torch.log_softmax(logits, dim=-1)[range(3), tokens[0, 1:]]
    found = score(loaded.causal_lm, [Request((256,), (1, 2, 3))], 100)[0].logprob
    assert found == pytest.approx(expected.sum().item(), abs=1e-4)
    batch = ContinuousBatch(loaded.causal_lm, loaded.tokenizer, BatchLimits(1))
    batch.add(GenerationRequest((256, 1, 2, 3), GenerationSettings(1, prompt_logprobs=True)))
    (result,) = batch.step()
    assert [each.logprob for each in result.prompt_logprobs[1:]] == pytest.approx(expected.tolist(), abs=1e-4)


def test_what_our_model_lacks_runs_with_transformers_code(folder, tmp_path: Path) -> None:
    paths = folder("llama", **DYNAMIC)
    with pytest.raises(InputError, match=r"rope_type='dynamic'.*model: \{transformers: .*model\} trains it"):
        import_checkpoint(paths.checkpoint, tmp_path / "imported")
    loaded = load_for_evaluation(paths, EvaluateConfig())
    assert "rope_type='dynamic'" in loaded.note and isinstance(loaded.causal_lm, TransformersCausalLM)
    assert not loaded.causal_lm.keeps_keys  # the angles of the tokens before change
    expected = greedy_ids(loaded.causal_lm.model, PROMPTS[0], 6)
    assert tokens_of(loaded)[0] == expected
    assert isinstance(load_for_evaluation(folder("llama"), EvaluateConfig()).causal_lm, LocalCausalLM)


def greedy_ids(model: torch.nn.Module, prompt: list[int], number: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + number and (tokens[-1] != 256 or len(tokens) == len(prompt)):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1, :257].argmax()))
    return [token for token in tokens[len(prompt) :] if token != 256]


@pytest.mark.parametrize(("stated", "fits"), [([1, 256], True), (None, True), ([1, 2], False)])
def test_several_tokens_may_end_a_text(stated, fits: bool, folder) -> None:
    paths = folder("llama", eos_token_id=stated)
    if fits:
        load_for_evaluation(paths, EvaluateConfig())
        return
    with pytest.raises(InputError, match="those the checkpoint was trained on with 1"):
        load_for_evaluation(paths, EvaluateConfig())


@pytest.mark.parametrize(("family", "padded"), [("cohere", True), ("mpt", None), ("gpt2", True), ("gemma3", False)])
def test_padded_rows_are_read_in_one_pass_with_the_logits_of_each_alone(family, padded, tmp_path: Path) -> None:
    """Prompts join and leave; a model whose cache drops keys is read row by row."""
    tiny_model(family).save_pretrained(tmp_path)
    lm, _ = load_transformers_causal_lm(open_causal_folder(tmp_path), single_process(), torch.float32, VOCABULARY)
    assert padded is None or lm.reads_padded_rows == padded
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCABULARY - 1, length).tolist() for length in (3, 9, 5, 12, 4, 7)]
    passes = []
    logits = lm._logits
    lm._logits = lambda tokens, **options: passes.append(len(tokens)) or logits(tokens, **options)
    batch = ContinuousBatch(lm, Numbers(), BatchLimits(3))
    settings = [GenerationSettings(5 + index, logprobs=0, ignore_end=True) for index in range(len(prompts))]
    numbers = [
        batch.add(GenerationRequest(tuple(prompt), each)) for prompt, each in zip(prompts, settings, strict=True)
    ]
    results = {}
    while not batch.is_idle:
        results |= {result.number: result for result in batch.step()}
    for number, prompt in zip(numbers, prompts, strict=True):
        (generation,) = results[number].generations
        whole = torch.tensor([[*prompt, *generation.tokens]])
        expected = torch.log_softmax(lm.model(input_ids=whole).logits[0, len(prompt) - 1 : -1].float(), -1)
        expected = expected[range(len(generation.tokens)), whole[0, len(prompt) :]]
        assert [each.logprob for each in generation.logprobs] == pytest.approx(expected.tolist(), abs=1e-4)
    if padded:
        assert max(passes) == 3 and len(passes) < 30  # row by row it is a pass for each of the 45 tokens
