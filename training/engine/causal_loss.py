"""The causal loss without data, for calibration, benchmarks and tests of the engine, which make their own batches."""

from gristmill.training.batches import SampleSource
from gristmill.training.model_config import ModelConfig
from gristmill.training.objectives.causal import Causal
from gristmill.training.objectives.objective import LossFunction, NoOptions, ObjectiveInputs, TermSpec


def causal_loss(z_loss: bool = False) -> LossFunction:
    """z_loss: the model has one."""
    names = ("nll", "z_loss") if z_loss else ("nll",)
    inputs = ObjectiveInputs(None, ModelConfig(layers=1, width=1, heads=1, positions="none"), 1, 0, 0)
    return LossFunction(Causal(inputs, NoOptions()), tuple(TermSpec(name, "weights", 1.0) for name in names))


def causal_samples(samples: object, mask_documents: bool = False) -> SampleSource:
    """The batches' fields of indexed samples."""
    model = ModelConfig(layers=1, width=1, heads=1, positions="none")
    return Causal(ObjectiveInputs(samples, model, 1, 0, 0, mask_documents), NoOptions())
