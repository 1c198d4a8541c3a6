"""The draft model of speculative decoding, as the command line names it."""

from pathlib import Path

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.drafts import NO_DRAFTS, Drafting
from gristmill.evaluation.inference.load import DraftOptions, LoadedModel, load_for_evaluation
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.workdir import CheckpointPaths, find_checkpoint
from gristmill.foundation.errors import RecipeError

COMPARED_TOKENS = 1000  # whose texts must be those of the draft model's tokenizer


def load_drafting(options: DraftOptions, loaded: LoadedModel, processes: int = 1) -> Drafting:
    """Loads the draft model. Raises RecipeError where it cannot guess for this model."""
    if options.model is None:
        return Drafting(options.tokens) if options.tokens else NO_DRAFTS
    if not options.tokens:
        raise RecipeError("--draft-model guesses no token without --draft-tokens; give it a number such as 4")
    if processes > 1:
        raise RecipeError("--draft-model runs in one process; leave it out, and --draft-tokens guesses from the text")
    if not loaded.causal_lm.reads_trees:
        raise RecipeError(
            f"{loaded.name} is decoded one token at a time (transformers' code, or layers that carry a state); "
            "leave --draft-model out"
        )
    paths = CheckpointPaths(find_checkpoint(options.model), options.tokenizer)
    draft = load_for_evaluation(paths, EvaluateConfig(), loaded.causal_lm.device)
    if not isinstance(draft.causal_lm, LocalCausalLM) or not draft.causal_lm.reads_trees:
        raise RecipeError(f"{options.model}: a draft model has attention layers only and runs in gristmill's own code")
    _check_vocabulary(options.model, draft, loaded)
    return Drafting(options.tokens, draft.causal_lm)


def _check_vocabulary(folder: Path, draft: LoadedModel, loaded: LoadedModel) -> None:
    size, own_size = draft.causal_lm.vocab_size, loaded.causal_lm.vocab_size
    if size != own_size:
        raise RecipeError(
            f"{folder}: the draft model has {size} tokens, the model {own_size}; give one of its tokenizer"
        )
    for token in range(0, size, max(1, size // COMPARED_TOKENS)):
        text, own_text = draft.codec.decode([token]), loaded.codec.decode([token])
        if text != own_text:
            raise RecipeError(
                f"{folder}: token {token} of the draft model is {text!r}, of the model {own_text!r}; give one of its "
                "tokenizer"
            )
