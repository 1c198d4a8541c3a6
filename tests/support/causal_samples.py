"""Samples of causal language modelling as the batches of a test read them."""

from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.objective import Causal, NoOptions, ObjectiveInputs, SampleSource


def causal_samples(samples: object, mask_documents: bool = False) -> SampleSource:
    """The batches' fields of indexed samples."""
    model = ModelConfig(layers=1, width=1, heads=1, positions="none")
    return Causal(ObjectiveInputs(samples, model, 1, 0, 0, mask_documents), NoOptions())
