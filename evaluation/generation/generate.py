"""Continuations of a list of prompts."""

from collections.abc import Sequence

from gristmill.evaluation.generation.batch import ContinuousBatch
from gristmill.evaluation.generation.limits import BatchLimits
from gristmill.evaluation.generation.request import Generation, GenerationRequest, GenerationSettings, TextStream
from gristmill.evaluation.generation.token_text import Decoder
from gristmill.evaluation.models.causal_lm import CausalLM
from gristmill.foundation.errors import InputError


def generate(
    causal_lm: CausalLM,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    batch_tokens: int = 8192,
    stream: TextStream | None = None,
) -> list[Generation]:
    """One continuation for each prompt, in order; independent of the other prompts of the batch, up to rounding.

    batch_tokens: of the cache, at the length of the longest prompt and its continuation. `stream` is called with
    (prompt index, new text) as soon as no later token can change the text. A prompt as long as the model's sequence
    length raises InputError; a shorter one is continued up to that length."""
    if not prompts:
        return []
    requests = [GenerationRequest(tuple(prompt), settings, index) for index, prompt in enumerate(prompts)]
    for index, request in enumerate(requests):
        try:
            request.check(causal_lm.sequence_length, causal_lm.vocab_size)
        except InputError as error:
            raise InputError(str(error).replace("the prompt", f"prompt {index}", 1)) from None
    longest = max(map(len, prompts)) + settings.max_new_tokens
    sequences = max(1, min(len(requests), batch_tokens // max(1, min(longest, causal_lm.sequence_length))))
    batch = ContinuousBatch(causal_lm, decoder, BatchLimits(sequences, min(batch_tokens, 2048)))
    index_of = {}
    for index in sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt), index)):
        index_of[batch.add(requests[index], _stream_of(stream, index))] = index
    found: dict[int, Generation] = {}
    while not batch.is_idle:
        for result in batch.step():
            if result.error is not None:
                raise result.error
            found[index_of[result.number]] = result.generations[0]
    return [found[index] for index in range(len(requests))]


def _stream_of(stream: TextStream | None, index: int) -> TextStream | None:
    return None if stream is None else lambda _, text: stream(index, text)
