"""Batched generation: stop strings, sampling, streaming, independence of the batch."""

import json

import pytest
import torch

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.prompts import BatchSize, PromptFile, Writer, generate, generate_file
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter

PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3]]


def greedy_without_cache(causal_lm, prompt, new_tokens, end):
    """The definition: the likeliest token after the whole text so far, read anew each time."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        logits = causal_lm.head(causal_lm.hidden(torch.tensor([tokens]))[0, -1:])[0]
        token = int(logits.argmax())
        if token == end or len(tokens) >= causal_lm.sequence_length:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("batch_tokens", [1, 40, 5000])
def test_greedy_equals_reading_the_whole_text_anew(small_causal_lm, byte_tokenizer, batch_tokens):
    causal_lm = small_causal_lm(sequence_length=30)
    found = generate(causal_lm, byte_tokenizer, PROMPTS, GenerationSettings(40), size=BatchSize(batch_tokens))
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert result.tokens == greedy_without_cache(causal_lm, prompt, 40, byte_tokenizer.end_of_document)
        assert result.ended in ("length", "document")


def test_sampling_depends_on_the_seed_and_the_prompts_place_alone(small_causal_lm, byte_tokenizer):
    causal_lm = small_causal_lm()
    warm = SamplingConfig(temperature=1.0, top_k=50, top_p=0.9, seed=5)
    together = generate(causal_lm, byte_tokenizer, PROMPTS, GenerationSettings(12, warm))
    apart = generate(causal_lm, byte_tokenizer, PROMPTS, GenerationSettings(12, warm), size=BatchSize(1))
    assert together == apart
    assert together[0] != together[3]  # the same prompt twice is two draws
    assert (
        generate(causal_lm, byte_tokenizer, PROMPTS, GenerationSettings(12, SamplingConfig(temperature=1.0, seed=6)))
        != together
    )


def test_a_stop_string_ends_the_text_before_it(small_causal_lm, byte_tokenizer):
    causal_lm = small_causal_lm()
    whole = generate(causal_lm, byte_tokenizer, [[1, 2, 3]], GenerationSettings(12))[0]
    stop = whole.text[4:6]
    stopped = generate(causal_lm, byte_tokenizer, [[1, 2, 3]], GenerationSettings(12, stops=(stop,)))[0]
    assert stopped.ended == "stop"
    assert stopped.text == whole.text[: whole.text.find(stop)]


def test_streamed_pieces_make_the_text(small_causal_lm, byte_tokenizer):
    pieces: dict[int, str] = {}

    def stream(index: int, text: str) -> None:
        pieces[index] = pieces.get(index, "") + text

    found = generate(
        small_causal_lm(),
        byte_tokenizer,
        PROMPTS,
        GenerationSettings(12, SamplingConfig(temperature=2.0), ("e",)),
        stream=stream,
    )
    assert pieces == {index: result.text for index, result in enumerate(found) if result.text}


def test_a_prompt_must_fit(small_causal_lm, byte_tokenizer):
    with pytest.raises(InputError, match="prompt 1 has 64 tokens; the model takes 1 to 63"):
        generate(small_causal_lm(sequence_length=64), byte_tokenizer, [[1], [1] * 64], GenerationSettings(4))
    with pytest.raises(InputError, match="prompt 0 has 0 tokens"):
        generate(small_causal_lm(), byte_tokenizer, [[]], GenerationSettings(4))


# Prompt files: results in order, errors of single records, and going on after a kill.

DEFAULT = GenerationSettings(6)
RECORDS = [
    {"id": "first", "prompt": "abc"},
    {"id": 7, "prompt": "x" * 80, "metadata": {"kind": ["too", "long"]}},
    {"tokens": [5, 6, 7], "max_tokens": 2},
    {"prompt": "abc", "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1},
    {"prompt": "abd", "temprature": 1.0},
    {"prompt": "abd", "tokens": [1]},
    {"prompt": "abd", "stop": ""},
    {"tokens": [1, 400]},
    {"prompt": "the last"},
]
BROKEN = [b"{not json", b"[1, 2]", b'"\xff"', b"[" * 100_000, b'{"a": 1, "a": 2}']


class Interrupted(Exception):
    pass


@pytest.fixture
def run(tmp_path, small_causal_lm, byte_tokenizer):
    """Runs a prompt file: (lines of the output, number of errors, read tokens). steps: killed after so many."""

    def generate_it(lines, name="out.jsonl", steps=None, model="m", slots=2):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_bytes(
            b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        )
        batch = ContinuousBatch(small_causal_lm(), byte_tokenizer, BatchLimits(slots))
        step, taken = batch.step, []

        def counted():
            taken.append(1)
            if steps is not None and len(taken) > steps:
                raise Interrupted
            return step()

        batch.step = counted
        files = PromptFile(prompts, tmp_path / name)
        files.check()
        errors = generate_file(
            files, batch, byte_tokenizer.encode, DEFAULT, Writer({"model": model}, Reporter.silent())
        )
        return [json.loads(line) for line in (tmp_path / name).read_bytes().splitlines()], errors, batch.read_tokens

    return generate_it


def test_each_record_has_its_line(run, small_causal_lm, byte_tokenizer):
    found, errors, _ = run(RECORDS)
    assert [line["line"] for line in found] == list(range(1, 10)) and errors == 5
    assert found[0]["id"] == "first"
    expected = generate(small_causal_lm(), byte_tokenizer, [byte_tokenizer.encode("abc")], DEFAULT)[0]
    assert found[0]["completions"] == [
        {"text": expected.text, "finish_reason": "length", "tokens": list(expected.tokens)}
    ]
    assert found[1]["error"] == "prompts.jsonl: line 2: the prompt has 80 tokens; the model takes 1 to 63: shorten it"
    assert found[1]["id"] == 7 and found[1]["metadata"] == {"kind": ["too", "long"]}
    assert len(found[2]["completions"][0]["tokens"]) == 2
    first, second = found[3]["completions"]
    assert first["tokens"] != second["tokens"] and len(first["logprobs"]) == len(first["tokens"])
    assert "line 5: unknown field 'temprature', did you mean 'temperature'?" in found[4]["error"]
    assert "line 6: give prompt (a text) or tokens (token ids), one of them" in found[5]["error"]
    assert "line 7: stop has an empty string" in found[6]["error"]
    assert "line 8: the prompt has token 400" in found[7]["error"]
    assert found[8]["completions"][0]["text"]


def test_lines_that_are_no_records_are_named_and_the_others_done(run):
    found, errors, _ = run([*BROKEN, {"prompt": "abc"}])
    assert errors == 5 and all(
        f"prompts.jsonl: line {number}: " in found[number - 1]["error"] for number in range(1, 6)
    )
    assert "not a JSON object but list" in found[1]["error"]
    assert found[5]["completions"][0]["text"]


def test_a_killed_run_goes_on_and_gives_the_same_bytes(run, tmp_path):
    whole, _, read = run(RECORDS, "whole.jsonl")
    with pytest.raises(Interrupted):
        run(RECORDS, steps=7)
    partial = tmp_path / "out.jsonl.partial"
    assert 1 < len(partial.read_bytes().splitlines()) < 1 + len(RECORDS)
    with partial.open("ab") as file:
        file.write(b'{"line": 4, "torn')
    again, errors, read_again = run(RECORDS, slots=1)
    assert again == whole and errors == 5 and read_again < read
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not partial.exists()


def test_a_partial_file_of_another_run_is_not_continued(run, tmp_path):
    with pytest.raises(Interrupted):
        run(RECORDS, steps=3)
    with pytest.raises(RecipeError, match=r"out.jsonl.partial: is of a run with other model; remove it"):
        run(RECORDS, model="another")
    with pytest.raises(RecipeError, match="with other prompts"):
        run(RECORDS[1:])
