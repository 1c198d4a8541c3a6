"""Loading checkpoints and tokenizers for evaluation, and the errors of mismatches and damage."""

import shutil
from pathlib import Path

import pytest

from gristmill.evaluation.convert.huggingface import write_huggingface
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.load_model import check_causal, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths, find_checkpoint
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import load_model


def test_a_run_a_checkpoint_and_its_export_are_the_same_subject(tmp_path, random_checkpoint, tokenizer_folder):
    old = random_checkpoint("llama", name="train/checkpoints", step=3)
    new = random_checkpoint("llama", name="train/checkpoints", step=12)
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "train") == find_checkpoint(new.parent) == new
    assert find_checkpoint(old) == old
    found = load_for_evaluation(CheckpointPaths(tmp_path), EvaluateConfig())
    assert (found.name, found.causal_lm.sequence_length) == ("step-00000012", 128)
    write_huggingface(tmp_path / "out", load_model(new)[0], 256, tokenizer_folder)
    exported = load_for_evaluation(CheckpointPaths(tmp_path / "out"), EvaluateConfig())
    assert exported.tokenizer.encode("grain") == found.tokenizer.encode("grain")


def test_another_tokenizer_is_refused(tmp_path, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint("llama", vocab_size=300)
    with pytest.raises(InputError, match="has 257 tokens and the checkpoint was trained on 300"):
        load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    write_huggingface(tmp_path / "padded", load_model(checkpoint)[0], 256, tokenizer_folder)
    assert load_for_evaluation(CheckpointPaths(tmp_path / "padded"), EvaluateConfig()).causal_lm.vocab_size == 257
    write_huggingface(tmp_path / "other_end", load_model(checkpoint)[0], 255, tokenizer_folder)
    with pytest.raises(InputError, match="end with token 256, those the checkpoint was trained on with 255"):
        load_for_evaluation(CheckpointPaths(tmp_path / "other_end"), EvaluateConfig())


def test_a_bidirectional_model_is_refused():
    check_causal(Path("run"), "causal")
    with pytest.raises(
        InputError, match="run: attention is bidirectional, and tasks and generation need a causal model"
    ):
        check_causal(Path("run"), "bidirectional")


def test_what_is_not_there_is_said(tmp_path, random_checkpoint, tokenizer_folder):
    with pytest.raises(InputError, match="no such folder; name a folder like"):
        load_for_evaluation(CheckpointPaths(tmp_path / "nowhere"), EvaluateConfig())
    shutil.rmtree(tokenizer_folder)
    checkpoint = random_checkpoint()
    with pytest.raises(InputError, match="no tokenizer in its folder or its run"):
        load_for_evaluation(CheckpointPaths(checkpoint), EvaluateConfig())
    with pytest.raises(InputError, match="name the tokenizer"):
        load_for_evaluation(CheckpointPaths(checkpoint, tmp_path / "nowhere"), EvaluateConfig())


def test_equal_answers_have_equal_digests(random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    paths = CheckpointPaths(checkpoint, tokenizer_folder)
    plain = load_for_evaluation(paths, EvaluateConfig())
    assert (
        plain.digest
        == load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig(limit=3)).digest
    )
    assert (
        plain.digest
        != load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig(precision="bf16")).digest
    )
    assert (
        plain.digest
        != load_for_evaluation(
            CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig(quantization="int8")
        ).digest
    )
