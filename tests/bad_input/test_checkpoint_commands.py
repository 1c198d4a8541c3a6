"""Errors of evaluate --checkpoint, generate, export, import and compare: wrong options and damaged files."""

import json
from pathlib import Path

import pytest
import torch
from bad_input import Case, each

from gristmill.training.checkpoint.checkpoint import CheckpointContent, SavedModelConfig, save, step_folder
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import single_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of a tiny model beside a tokenizer of bytes, and a benchmark of nine questions below data/."""
    torch.manual_seed(0)
    config = ModelConfig(layers=1, width=16, heads=2, sequence_length=128)
    model = Transformer(config, 257)
    tensors = {f"model.{name}": torch.randn(value.shape) * 0.1 for name, value in model.named_parameters()}
    save(tmp_path / "run", 3, CheckpointContent(tensors, SavedModelConfig.of(config, 257, 256)), single_process())
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, END: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return step_folder(tmp_path / "run", 3)


RECORDS = [
    {"sentence1": f"Miller {number} ran.", "sentence2": "He ran.", "gold_label": ["entailment", "non"][number % 2]}
    for number in range(9)
]
HANS = "data/benchmarks/hans_evaluation.jsonl"
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
CONFIG = json.dumps({"model_type": "llama", "vocab_size": 3, "hidden_act": "silu"})


def asked(name: str, options: str, *words: str, code: int = 2, **files: str | bytes) -> Case:
    command = "evaluate --checkpoint {trained} --data data --output out " + options
    named = {{"hans": HANS, "task": "mine/task.yaml"}[key]: content for key, content in files.items()}
    return Case(name, command, words, code, {HANS: LINES, **named}, fixtures=("trained",))


def written(name: str, options: str, *words: str, code: int = 2) -> Case:
    return Case(name, "generate --checkpoint {trained} --prompt The --tokens 3 " + options, words, code,
                fixtures=("trained",))  # fmt: skip


def taken_in(name: str, *words: str, folder: str = "theirs", **files: str | bytes) -> Case:
    named = {f"theirs/{key.replace('__', '.')}": content for key, content in files.items()}
    return Case(name, f"import {folder} --output in", words, 1, named)


def compared(name: str, *words: str, **files: str | bytes) -> Case:
    named = {f"first/{key.replace('__', '.')}": content for key, content in files.items()}
    return Case(name, "compare first first", words, 1, named)


TASK = "--tasks gristmill_hans"
BROKEN = '{"sentence1": "a", "sentence2": "b", "gold_label": "c"}\n{"sentence1": 3, "sentence2": [], "gold_label": 1}\n'
CASES = [
    asked("no_tasks", "--tasks ''", "--tasks needs names separated by single commas"),
    asked("only_a_comma", "--tasks ,", "--tasks needs names separated by single commas"),
    asked("a_comma_too_many", "--tasks gristmill_hans,,", "--tasks needs names separated by single commas"),
    asked("a_task_twice", "--tasks gristmill_hans,gristmill_hans", "names gristmill_hans twice"),
    asked("misspelt_task", "--tasks piqqa", "no task 'piqqa'; the nearest is 'piqa'"),
    asked("no_task_file", "--tasks mine.yaml", "mine.yaml: no such task file", code=1),
    asked("code_in_a_task_file", "--tasks mine/task.yaml", "!function can run code",
          task="task: a\ndoc_to_text: !function b.c\n"),
    asked("broken_task_file", "--tasks mine/task.yaml", "not YAML", task="task: [\n"),
    asked("no_include_path", f"{TASK} --include-path nowhere", "nowhere: no such folder", code=1),
    asked("limit_zero", f"{TASK} --limit 0", "--limit"),
    asked("limit_huge", f"{TASK} --limit 1000000000000000000000000", "limit"),
    asked("shots_negative", f"{TASK} --num-fewshot -1", "--num-fewshot"),
    asked("shots_huge", f"{TASK} --num-fewshot 1000000000000", "has 8 few-shot examples, 1000000000000 are requested"),
    asked("one_shot_too_many", f"{TASK} --num-fewshot 9", "has 8 few-shot examples, 9 are requested"),
    asked("parts_without_processes", f"{TASK} --tensor 2", "one process cannot hold tensor=2"),
    asked("precision", f"{TASK} --precision fp64", "precision", "fp32"),
    asked("quantization", f"{TASK} --quantization int3", "quantization", "int8"),
    asked("no_tokenizer", f"{TASK} --tokenizer nowhere", "nowhere: no such folder", code=1),
    asked("no_corpus", "--tasks cloze --corpus nowhere", "nowhere: the stages curate and index are not complete", code=1),
    asked("data_not_text", TASK, "not UTF-8", code=1, hans=b"\xff\xfe\x00"),
    asked("data_of_two_types", TASK, "hans_evaluation.jsonl: a field has different types", code=1, hans=BROKEN),
    asked("data_nested", TASK, "hans_evaluation.jsonl", code=1, hans="[" * 100_000),
    asked("data_half_a_character", TASK, "a value that is no text", code=1,
          hans=LINES.replace("Miller 0", "Miller \\ud800")),
    asked("data_empty", TASK, "has no record", code=1, hans="\n"),
    written("seed", "--seed -5", "seed", "greater than or equal to 0"),
    written("temperature", "--temperature inf", "temperature"),
    written("penalty", "--repetition-penalty 0", "repetition_penalty"),
    written("empty_stop", "--stop ''", "--stop is empty"),
    written("no_tokens", "--tokens 0", "--tokens"),
    Case("half_a_character", "generate --checkpoint {trained} --prompt \udcff", ("not valid UTF-8",),
         fixtures=("trained",)),
    Case("no_scores", "export --checkpoint {trained} --output out --scores nowhere", ("nowhere: has no table.md",), 1,
         fixtures=("trained",)),
    taken_in("a_file", "config.json: is a file; name the folder", folder="theirs/config.json", config__json=CONFIG),
    taken_in("no_config", "config.json: absent", model__safetensors=b""),
    taken_in("config_not_json", "config.json: not JSON", config__json="{"),
    taken_in("no_object", "config.json: is not a JSON object", config__json="[]"),
    taken_in("no_model_type", "model_type", config__json="{}"),
    taken_in("too_few_fields", "config.json: has no field", config__json=CONFIG),
    compared("results_cut", "results.json: damaged", "evaluate again", results__json="{"),
    compared("results_of_nothing", "results.json: damaged", results__json="{}"),
    compared("results_without_tasks", "have no task in common",
             results__json='{"task_hashes": {}, "higher_is_better": {}}'),
]  # fmt: skip


@each(CASES)
def test_checkpoint_commands(case, expect_error):
    expect_error(case)
