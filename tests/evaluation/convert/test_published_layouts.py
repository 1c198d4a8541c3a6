"""Replicas of published folders are spoken to as transformers speaks to them."""

import json
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import load_file

from gristmill.evaluation.convert.model_tokenizer import load_model_tokenizer
from gristmill.evaluation.import_export import export_checkpoint, import_checkpoint
from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.load_model import LoadedModel, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from tests.support.published_layouts import LAYOUTS, write_layout

transformers = pytest.importorskip("transformers")
PROMPTS = ["The mill turns all day.", "1234 bags\n\n of flour ", "é — “naïve”", "x\ty  z"]
# transformers 5 drops the space that SentencePiece puts before a text where the text begins with one itself.
DROPS_A_SPACE = ("llama1", "llama2", "phi3", "zephyr")
CHATS = [
    [{"role": "user", "content": "What's the weather?"}],
    [
        {"role": "user", "content": " The mill turns\n"},
        {"role": "assistant", "content": "It stands. "},
        {"role": "user", "content": "1234 bags"},
    ],
]
SYSTEM = [{"role": "system", "content": "You are a mill."}, *CHATS[0]]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"é": {}}}}}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a replica without weights, each written once."""
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = write_layout(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return write


@pytest.mark.parametrize("name", LAYOUTS)
def test_prompts_and_chats_have_the_ids_of_transformers(name: str, folder_of) -> None:
    folder = folder_of(name)
    peer, ours = transformers.AutoTokenizer.from_pretrained(folder), load_model_tokenizer(folder)
    prompts = [*PROMPTS, *([] if name in DROPS_A_SPACE else ["  1234 bags"])]
    assert ours.encode_bounded(prompts) == [peer.encode(text) for text in prompts]
    if not LAYOUTS[name].has_chat:
        assert ours.chat_template().is_plain
        return
    template = ours.chat_template()
    for chat in [*CHATS, SYSTEM]:
        for tools in (None, [TOOL]):
            text = peer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
            assert template.render(chat, tools) == text
            assert ours.encode_chat(text, template) == peer(text, add_special_tokens=False)["input_ids"]


def test_a_tool_conversation_is_rendered_as_by_transformers(folder_of) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
    chat = [
        *CHATS[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "1"},
    ]
    folder = folder_of("qwen2")
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert load_model_tokenizer(folder).chat_template().render(chat, [TOOL]) == expected


def test_a_tokenizer_json_with_added_tokens_wins_over_the_model_file(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, "llama1")
    plain = load_model_tokenizer(folder)
    write_layout(tmp_path / "other", "hermes")
    content = json.loads((tmp_path / "other/tokenizer.json").read_text())
    shift = max(0, plain.vocab_size - min(t["id"] for t in content["added_tokens"] if "im_" in t["content"]))
    for token in content["added_tokens"]:
        token["id"] += shift if "im_" in token["content"] else 0
    (folder / "tokenizer.json").write_text(json.dumps(content))
    fuller = load_model_tokenizer(folder)
    assert fuller.id_of("<|im_start|>") is not None and plain.id_of("<|im_start|>") is None


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, "qwen3")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="refuses these messages"):
        load_model_tokenizer(folder).chat_template().render(CHATS[0])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="not valid Jinja"):
        load_model_tokenizer(folder).chat_template()


QUICK = ("llama1", "llama2", "qwen2", "gpt2")
IMPORTED = tuple(name for name in LAYOUTS if name != "t5")  # an encoder and a decoder
BY_TRANSFORMERS = ("command_r",)  # its weights have no table: transformers' code runs the folder
NEW_TOKENS = 24


def model_names(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folders: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in folders:
            folders[name] = write_layout(tmp_path_factory.mktemp(name), name, weights=True)
        return folders[name]

    return write


def continuations(loaded: LoadedModel) -> list[list[int]]:
    """Greedy tokens with the publisher's repetition penalty."""
    prompts = [loaded.tokenizer.encode_prompt(text) for text in PROMPTS]
    sampling = SamplingConfig(**loaded.tokenizer.generation.sampling_fields(0.0))
    return [
        list(text.tokens)
        for text in generate(loaded.causal_lm, loaded.tokenizer, prompts, GenerationSettings(NEW_TOKENS, sampling))
    ]


@pytest.mark.parametrize("name", model_names(IMPORTED))
def test_texts_end_where_transformers_ends_them(name: str, model_of) -> None:
    folder = model_of(name)
    loaded = load_for_evaluation(CheckpointPaths(folder), EvaluateConfig())
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ends = peer.generation_config.eos_token_id
    assert set(loaded.tokenizer.ends) == set(ends if isinstance(ends, list) else [ends])
    ended = 0
    for text, tokens in zip(PROMPTS, continuations(loaded), strict=True):
        prompt = torch.tensor([loaded.tokenizer.encode_prompt(text)])
        (output,) = peer.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0).tolist()
        written = output[prompt.shape[1] :]
        ended += written[-1] in loaded.tokenizer.ends
        assert tokens == [token for token in written if token not in loaded.tokenizer.ends]
    assert ended


@pytest.mark.parametrize("name", model_names([name for name in IMPORTED if name not in BY_TRANSFORMERS]))
def test_the_folder_exported_again_is_what_it_was(name: str, model_of, tmp_path: Path) -> None:
    folder = model_of(name)
    imported = import_checkpoint(folder, tmp_path / "imported")
    export_checkpoint(imported, tmp_path / "out")
    for path in folder.iterdir():
        if path.name in ("config.json", "model.safetensors", "README.md"):
            continue
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert all(torch.equal(before[key], after[key]) for key in before if key in after) and after.keys() <= before.keys()
    old, new = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "architectures", "model_type"):
        assert new.get(key) == old.get(key), key
    ours, again = (
        load_for_evaluation(CheckpointPaths(place), EvaluateConfig()) for place in (imported, tmp_path / "out")
    )
    assert ours.tokenizer.ends == again.tokenizer.ends and ours.tokenizer.generation == again.tokenizer.generation
    assert continuations(ours) == continuations(again)


PAIRS = [("The mill turns", " all day."), ("1234 bags", " of flour"), ("", "The mill")]


@pytest.mark.parametrize("name", model_names(IMPORTED))
def test_scores_are_those_of_hflm(name: str, model_of) -> None:
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate; pip install 'gristmill[bench]'")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    folder = model_of(name)
    loaded = load_for_evaluation(CheckpointPaths(folder), EvaluateConfig())
    ours = LmEvalAdapter(loaded.causal_lm, loaded.tokenizer, 4096, Reporter.silent())
    peer = huggingface.HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    requests = [Instance("loglikelihood", {}, pair, index, ("t", index, 1)) for index, pair in enumerate(PAIRS)]
    until = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = [
        Instance("generate_until", {}, (text, dict(until)), index, ("g", index, 1))
        for index, text in enumerate(PROMPTS)
    ]
    for (logprob, greedy), expected in zip(
        ours.loglikelihood(requests), peer.loglikelihood(requests, True), strict=True
    ):
        assert (logprob, greedy) == (pytest.approx(expected[0], rel=1e-5, abs=1e-4), bool(expected[1]))
    texts, expected_texts = ours.generate_until(asked), peer.generate_until(asked, disable_tqdm=True)
    pairs = list(zip(texts, expected_texts, strict=True))
    if (folder / "tokenizer.model").is_file():
        # Of bytes that are no UTF-8 SentencePiece and tokenizers write U+FFFD in different numbers.
        pairs = [pair for pair in pairs if "\N{REPLACEMENT CHARACTER}" not in "".join(pair)]
    assert pairs and all(text == expected for text, expected in pairs)
