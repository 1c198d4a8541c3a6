"""The draft model of the command line: loaded where it can guess, refused with a reason where not."""

import pytest

from gristmill.evaluation.commands import generate_text
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.load_model import DraftOptions, Ranks, load_drafting, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.errors import RecipeError


def test_a_draft_model_changes_no_text(random_checkpoint, tokenizer_folder):
    source = CheckpointPaths(random_checkpoint(), tokenizer_folder)
    settings = GenerationSettings(30)
    (plain,) = generate_text(source, ["one two"], settings)
    for options in (DraftOptions(3), DraftOptions(3, source.checkpoint, tokenizer_folder)):
        (guessed,) = generate_text(source, ["one two"], settings, ranks=Ranks(drafts=options))
        assert guessed.tokens == plain.tokens


def test_a_draft_model_that_cannot_guess_is_refused(random_checkpoint, tokenizer_folder):
    source = CheckpointPaths(random_checkpoint(), tokenizer_folder)
    loaded = load_for_evaluation(source, EvaluateConfig())
    with pytest.raises(RecipeError, match="no token without --draft-tokens"):
        load_drafting(DraftOptions(0, source.checkpoint), loaded)
    with pytest.raises(RecipeError, match="runs in one process"):
        load_drafting(DraftOptions(2, source.checkpoint), loaded, processes=2)
