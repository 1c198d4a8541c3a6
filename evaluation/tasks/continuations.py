"""Example continuations of held-out texts for the report."""

from collections.abc import Mapping, Sequence

from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.generate.request import GenerationSettings
from gristmill.evaluation.scoring.lm_eval_adapter import TextTokenizer
from gristmill.evaluation.tasks.corpus_tasks import HeldOutDocument
from gristmill.foundation.config import Config

PROMPT_TOKENS = 48


class Continuation(Config):
    """prompt: beginning of a held-out document; reference: its real continuation; greedy, sampled: the model's."""

    source: str
    doc_id: str
    prompt: str
    reference: str
    greedy: str
    sampled: str


def continuations(
    causal_lm: CausalLM,
    codec: TextTokenizer,
    documents: Mapping[str, Sequence[HeldOutDocument]],
    config: EvaluateConfig,
) -> list[Continuation]:
    """Continuations of config.num_continuations documents, from the sources in turn; prompts are their first tokens."""
    chosen = _first_of_each_source(documents, config.num_continuations, codec)
    prompt_tokens = max(1, min(PROMPT_TOKENS, causal_lm.sequence_length - config.continuation_tokens))
    encoded = [list(codec.encode(document.text[:4000])) for document in chosen]
    tokenizer = ModelTokenizer.of(codec)
    begin = [*tokenizer.prompt_prefix]
    prompts = [[*begin, *ids[:prompt_tokens]][:prompt_tokens] for ids in encoded]
    greedy = generate(causal_lm, tokenizer, prompts, GenerationSettings(config.continuation_tokens))
    sampled = generate(causal_lm, tokenizer, prompts, GenerationSettings(config.continuation_tokens, config.sampling))
    return [
        Continuation(
            source=document.source,
            doc_id=document.doc_id,
            prompt=codec.decode(prompt[len(begin) :]),
            reference=codec.decode(ids[len(prompt) - len(begin) :][: config.continuation_tokens]),
            greedy=plain.text,
            sampled=drawn.text,
        )
        for document, ids, prompt, plain, drawn in zip(chosen, encoded, prompts, greedy, sampled, strict=True)
    ]


def _first_of_each_source(
    documents: Mapping[str, Sequence[HeldOutDocument]], count: int, codec: TextTokenizer
) -> list[HeldOutDocument]:
    """`count` documents with more than PROMPT_TOKENS tokens: the first of each source, then the second, and so on."""
    long_enough = {
        source: [document for document in source_documents if len(codec.encode(document.text[:2000])) > PROMPT_TOKENS][
            :count
        ]
        for source, source_documents in (
            (source, source_documents[: 20 * count]) for source, source_documents in sorted(documents.items())
        )
    }
    turns = [(turn, source) for turn in range(count) for source in long_enough]
    taken = [long_enough[source][turn] for turn, source in turns if turn < len(long_enough[source])]
    return taken[:count]
