"""Log-probabilities of the tokens of a prompt."""

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.request import TokenLogprob
from gristmill.evaluation.inference.generate.sequence import log_softmax, top_logprobs

# N positions, T tokens, D width, V rows of the table

LOGIT_CELLS = 1 << 22  # logits of a prompt that are computed at a time


def logits_of(causal_lm: CausalLM, hidden_ND: Tensor) -> Tensor:
    """Logits [N, V] in float32 or better."""
    logits_NV = causal_lm.head(hidden_ND)
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def prompt_logprobs(causal_lm: CausalLM, hidden_TD: Tensor, prompt: np.ndarray, top: int) -> tuple[TokenLogprob, ...]:
    """Those of every token, None for the first. hidden: of the whole prompt."""
    scored = [TokenLogprob(int(prompt[0]), None)]
    size = max(1, LOGIT_CELLS // causal_lm.vocab_size)
    for first in range(0, len(prompt) - 1, size):
        end = min(first + size, len(prompt) - 1)
        logits_NV = logits_of(causal_lm, hidden_TD[first:end]).cpu().numpy()
        for logits_V, token in zip(logits_NV, prompt[first + 1 : end + 1].tolist(), strict=True):
            logprobs_V = log_softmax(logits_V)[: causal_lm.vocab_size]
            scored.append(TokenLogprob(token, float(logprobs_V[token]), top_logprobs(logprobs_V, top)))
    return tuple(scored)
