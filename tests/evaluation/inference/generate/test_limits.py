"""Limits of a batch by the memory of the cache."""

from dataclasses import replace

import pytest
import torch

from gristmill.evaluation.inference.generate.drafts import Drafting
from gristmill.evaluation.inference.generate.limits import default_limits
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.startup import available_bytes
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.parallel.mesh import build_mesh
from tests.evaluation.inference.generate.test_batch import CONTEXT, model_of

TOKEN_BYTES = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, width, bytes


def test_the_cache_has_as_many_blocks_of_16_tokens_as_its_memory_holds():
    causal_lm = model_of("attention")
    limits = default_limits(causal_lm, cache_bytes=5 * 16 * TOKEN_BYTES - 1)
    assert (limits.sequences, limits.cache_blocks) == (32, 4)
    drafted = default_limits(causal_lm, 8, Drafting(2, causal_lm), cache_bytes=5 * 16 * TOKEN_BYTES)
    assert (drafted.sequences, drafted.cache_blocks) == (8, 2)  # each token is in two caches
    with pytest.raises(RecipeError, match="holds 15 tokens; give a larger --cache-gib"):
        default_limits(causal_lm, cache_bytes=16 * TOKEN_BYTES - 1)


def test_by_default_the_cache_may_take_half_of_the_free_memory():
    blocks = default_limits(model_of("attention")).cache_blocks
    assert blocks * 16 * TOKEN_BYTES < available_bytes()


class WholeSlots:
    """A model whose cache has memory for the longest sequence in every slot, as on a GPU."""

    def __init__(self, causal_lm):
        self.device, self.sequence_length = causal_lm.device, CONTEXT
        self.slot_token_bytes, self.paged_cache = causal_lm.slot_token_bytes, False


def test_without_pages_as_many_sequences_run_as_fit_at_full_length():
    causal_lm = WholeSlots(model_of("attention"))
    limits = default_limits(causal_lm, 64, cache_bytes=3 * CONTEXT * TOKEN_BYTES)
    assert limits == replace(limits, sequences=3, cache_blocks=None)
    with pytest.raises(RecipeError, match="holds 95 tokens, and a sequence may have 96"):
        default_limits(causal_lm, cache_bytes=CONTEXT * TOKEN_BYTES - 1)


def limits_on_ranks(layout):
    """The second process has half of the memory."""
    mesh = build_mesh(layout, 2, torch.device("cpu"))
    cache_bytes = 64 * 16 * TOKEN_BYTES // (1 + mesh.world.rank)
    return default_limits(model_of("attention"), cache_bytes=cache_bytes, ranks=mesh.world).cache_blocks


def test_ranks_agree_on_the_least_cache(pool):
    assert pool.run(2, limits_on_ranks, LayoutConfig(pipeline=2)) == [32, 32]
