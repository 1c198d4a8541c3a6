"""The interface of a training objective: three functions; the default objective, causal language modelling; and the
batches of a step. docs/objectives.md teaches the functions with worked examples."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gristmill.foundation import user_code
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.heads import ModelOutput
from gristmill.training.parallel.context import HOST_DOCUMENTS
from gristmill.training.parallel.mesh import Axis

# B samples of a micro-batch

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """One summand of the loss: weight x (sum over the global batch) / (count over the global batch).

    sum: float[B], one number for each sample. count: name of the batch field whose sum over the global batch divides;
    None: the number of samples. weight 0: logged only. The first term is the run's `loss`."""

    name: str
    sum: Tensor
    count: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class TermSpec:
    """A term without its sum: the same in every batch of a run."""

    name: str
    count: str | None
    weight: float

    def counts(self, batch: Batch) -> Tensor:
        """Counts of the samples, float64[B]."""
        if self.count is None:
            return torch.ones(len(batch["samples"]), dtype=torch.float64)
        return batch[self.count].reshape(len(batch["samples"]), -1).sum(dim=1, dtype=torch.float64)


@dataclass(frozen=True)
class NoCorpus:
    """Stands for the indexed corpus where an objective makes its samples without one."""

    vocab_size: int
    fingerprint: str = ""

    def source_of(self, k: int) -> str:
        return "all"


@dataclass(frozen=True)
class ObjectiveInputs:
    """Inputs of an objective. samples: the indexed corpus of one split, in the form that the objective's `data`
    names (`NoCorpus` where the objective makes its own); mask_documents: as the recipe's section `index` has it.
    seed: of the recipe. split: of the samples. pieces: the tokenizer's pieces by id. encode: a text's token ids."""

    samples: Any
    model: ModelConfig
    vocab_size: int
    end_of_document: int
    seed: int
    mask_documents: bool = False
    split: Literal["train", "validation", "test"] = "train"
    pieces: Sequence[str] = ()
    encode: Callable[[str], list[int]] | None = None

    def id_of(self, piece: str) -> int:
        """Raises RecipeError if the tokenizer has no such piece."""
        if piece not in self.pieces:
            raise RecipeError(
                f"train.objective: the tokenizer has no piece {piece!r}; add it to tokenizer.user_symbols, or name "
                "another symbol in train.objective_options"
            )
        return list(self.pieces).index(piece)


class NoOptions(Config):
    """An objective without options."""


class Objective:
    """sample: the fields of sample k. loss: the terms of a micro-batch. predict: what the model answers to it.

    A subclass defines the three functions, and where it has settings an `Options` class for `train.objective_options`.
    Sums over samples are the only link between samples, so that no layout changes the loss."""

    Options: type[Config] = NoOptions
    # True where the first term is the negative log-likelihood of all text, so that the logs have bits per byte.
    bits_per_byte = False
    # The form of `inputs.samples`: windows of tokens (indexed/samples.py) or pairs of text segments, from data that is
    # split into sentences (indexed/sentence_pairs.py). own: the objective makes its samples without a corpus.
    data: Literal["windows", "sentence_pairs", "own"] = "windows"

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        self.inputs, self.options = inputs, options

    @classmethod
    def pieces(cls, options: Any) -> Sequence[str]:
        """Symbols that the tokenizer must have."""
        return ()

    @classmethod
    def check_records(cls, options: Any) -> None:
        """Raises InputError, with file and line, if a record of a file that the options name is wrong."""

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        """Sample k by field, a pure function of k. Every sample has the same fields, shapes and dtypes.

        `tokens` int64[T], or [R, T] for R rows, goes into the model, with `positions`, `documents` and `segments` of
        the same shape where they are given. All other fields are for `loss` and `predict`. `samples` is reserved."""
        raise NotImplementedError

    def batch(self, numbers: range) -> Mapping[str, np.ndarray]:
        """The fields of these samples, each [N, ...], from `sample` for each; objectives whose samples can be made
        together do it here. Raises RecipeError where `sample` fails or gives other fields, shapes or dtypes."""
        drawn = []
        for k in numbers:
            with user_errors_named(f"sample({k}) fails"):
                drawn.append(self.sample(k))
        try:
            return stack_samples(drawn)
        except (ValueError, TypeError, KeyError) as error:
            message = (
                f"the samples {numbers[0]} to {numbers[-1]} do not fit together ({error}); give all the same fields"
            )
            raise wrong(self, "sample", f"{message}, shapes and dtypes") from error

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        """The terms of a micro-batch, the same ones in every call. batch: the fields, each [B, ...]."""
        raise NotImplementedError

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        """Predictions by name, each [B, ...]."""
        raise NotImplementedError

    def scored_with(self, k: int) -> range:
        """The samples whose predictions are scored together with that of sample k, such as the windows of one passage;
        by default k alone."""
        return range(k, k + 1)

    def scores(self, k: int, predictions: Sequence[Mapping[str, Tensor]]) -> Mapping[str, float]:
        """Metrics whose means the stage evaluate reports; none by default. k: the first of the samples that are scored
        together; predictions: of all of them."""
        return {}

    def chances(self, k: int) -> Mapping[str, float]:
        """The same metrics of an answer without looking at the samples."""
        return {}

    @property
    def num_samples(self) -> int | None:
        """Samples of the split, where they are few enough to evaluate all of them; None otherwise."""
        return None

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a run resumes on equal data only."""
        fingerprint: str = self.inputs.samples.fingerprint
        return fingerprint

    def source_of(self, k: int) -> str:
        """The source of sample k, by which validation losses are listed."""
        source: str = self.inputs.samples.source_of(k)
        return source


@dataclass(frozen=True)
class LossFunction:
    """The loss of an objective as the engine computes it at the end of the model: float[B, terms]."""

    objective: Objective
    terms: tuple[TermSpec, ...]

    def __call__(self, model: ModelOutput, batch: Batch) -> Tensor:
        with user_errors_named("loss fails"):
            terms = self.objective.loss(model, batch)
        returned = tuple(TermSpec(term.name, term.count, float(term.weight)) for term in terms)
        if returned != self.terms:
            raise wrong(
                self.objective, "loss", f"returns {returned} after {self.terms}; return the same terms for every batch"
            )
        return torch.stack([term.sum.to(model.loss_dtype) for term in terms], dim=1)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the loss is a mean over tokens by the field `weights`, which experts' side losses follow."""
        return self.terms[0].count == "weights"


def stack_samples(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The fields of the first sample, each [N, ...]."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def token_terms(name: str, model: ModelOutput, batch: Batch) -> list[Term]:
    """The mean negative log-likelihood of `targets` over the tokens by `weights`, and the z-loss where train.z_loss is
    set."""
    nll, z_loss = model.token_losses(batch["targets"], batch["weights"])
    terms = [Term(name, nll, "weights")]
    return [*terms, Term("z_loss", z_loss, "weights")] if model.has_z_loss else terms


def no_sum(batch: Batch) -> Tensor:
    """float[B] zeros, for a term that this batch has nothing for."""
    return torch.zeros(len(batch["tokens"]), device=batch["tokens"].device)


# Causal language modelling: the next token of every token (the default).


class Causal(Objective):
    """The fused loss over the vocabulary, and the z-loss where train.z_loss is set."""

    bits_per_byte = True

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        return {name: values[0] for name, values in self.batch(range(k, k + 1)).items()}

    def batch(self, numbers: range) -> Mapping[str, np.ndarray]:
        drawn = self.inputs.samples.batch(numbers)
        learned = ("tokens", "targets", "weights")
        return {name: drawn[name] for name in (*learned, *(("positions", "documents") * self.inputs.mask_documents))}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        return token_terms("nll", model, batch)

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"targets": model.best_tokens()}


# Distillation: causal language modelling, and the divergence from a frozen teacher (train.teacher).


class DistillationOptions(Config):
    """weight x temperature^2 x KL(teacher || student) is added to the loss of each token."""

    weight: float = Field(1.0, gt=0, description="factor on the divergence")
    temperature: float = Field(1.0, gt=0, description="logits of both models are divided by this")


class Distillation(Causal):
    """As Mixture-of-Students does (arXiv 2201.05596, section 4.4)."""

    Options = DistillationOptions

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        divergence = no_sum(batch)
        if model.has_teacher:
            divergence = model.divergence_from_teacher(batch["weights"], self.options.temperature)
        return [*super().loss(model, batch), Term("divergence", divergence, "weights", self.options.weight)]


# Batches: the samples of a step as tensors on this process's device. Each data rank takes a contiguous range of the
# step's sample numbers. Which samples a step takes depends only on the number of samples before it.


class SampleSource(Protocol):
    """The samples that batches are made of, by field; an objective is one."""

    def batch(self, numbers: range) -> Mapping[str, np.ndarray]: ...

    def source_of(self, k: int) -> str: ...


class Batches:
    """Prefetches the next batch in a thread. problem: what is wrong with the fields of a batch, None if nothing is.
    on_host: of `on_device`."""

    def __init__(
        self,
        source: SampleSource,
        data: Axis,
        device: torch.device,
        problem: Callable[[Mapping[str, Tensor]], str | None] = lambda fields: None,
        on_host: bool = False,
    ):
        self.source, self.data, self.device, self.problem, self.on_host = source, data, device, problem, on_host
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[tuple[int, int], Future[dict[str, Tensor]]] = {}

    def take(self, first: int, count: int) -> dict[str, Tensor]:
        """This data rank's share of the samples first to first + count - 1."""
        reading = self._ahead.pop((first, count), None)
        batch = reading.result() if reading else self._read(first, count)
        return on_device(batch, self.device, self.on_host)

    def prepare(self, first: int, count: int) -> None:
        """Starts reading the next batch that `take` will return."""
        self._ahead = {(first, count): self._thread.submit(self._read, first, count)}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, first: int, count: int) -> dict[str, Tensor]:
        share = count // self.data.size
        start = first + self.data.rank * share
        batch = collate(self.source, range(start, start + share))
        if (problem := self.problem(batch)) is not None:
            raise wrong(self.source, "sample", f"in the samples {start} to {start + share - 1} {problem}")
        if self.device.type != "cuda":
            return batch
        return {name: values.pin_memory() for name, values in batch.items()}  # else the copy to the GPU is waited for


def on_device(batch: Batch, device: torch.device, on_host: bool) -> dict[str, Tensor]:
    """The fields copied to the device. on_host: the documents stay on the host too, as HOST_DOCUMENTS: a context rank
    plans its attention there, and would wait for the device if it had to read them from it."""
    fields = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
    return fields | ({HOST_DOCUMENTS: batch["documents"]} if on_host and "documents" in batch else {})


def collate(source: SampleSource, numbers: range) -> dict[str, Tensor]:
    """The fields of the samples, each [samples, ...], integers as int64; and `samples`, their numbers. Raises
    RecipeError where an objective fails, or where its samples do not have the same fields and shapes."""
    batch = {name: _tensor(values) for name, values in source.batch(numbers).items()}
    batch["samples"] = torch.arange(numbers.start, numbers.stop)
    return batch


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False) if values.dtype.kind in "iu" else values)


def range_problem(fields: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> str | None:
    """Whether an input of the model is outside its table. fields: arrays or tensors of a sample or of a batch."""
    limits = {"tokens": vocab_size, "segments": model.segments or 1, "positions": model.sequence_length}
    for name, limit in limits.items():
        values = fields.get(name)
        if values is not None and (values.min() < 0 or values.max() >= limit):
            return f"{name} run from {values.min()} to {values.max()}, allowed are 0 to {limit - 1}"
    return None


# Errors of an objective as one line: the file and line they come from, and what to change.

OBJECTIVES = Path(__file__).parent


def errors_named(what: str, place: str = "") -> AbstractContextManager[None]:
    """Turns an exception of an objective, and an exit, into a RecipeError with the file and line it came from. place:
    of exceptions that come from no line of the file."""
    return user_code.errors_named("train.objective", what, place, _is_engine)


@contextmanager
def user_errors_named(what: str) -> Iterator[None]:
    """As `errors_named`, for calls during a run: only of exceptions that the user's own lines raise; those of
    gristmill, such as a lost connection or too little memory, pass."""
    try:
        yield
    except (RecipeError, InputError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames if not user_code.is_library(frame.filename)]
        if user_code.is_gristmill(Path(files[-1])):
            raise
        raise user_code.named_error(error, "train.objective", what, "", _is_engine) from error


def wrong(objective: Any, function: str, problem: str) -> RecipeError:
    """Error of a function of the objective that returns a wrong value."""
    return RecipeError(f"train.objective: {defined_at(type(objective), function)}: {problem}")


def defined_at(objective: type, function: str) -> str:
    """The line of the function's definition: mine.py:12."""
    return user_code.defined_at(getattr(objective, function, objective))


def _is_engine(path: Path) -> bool:
    """True for gristmill's files but those of the objectives that come with it."""
    if path.parent == OBJECTIVES:
        return path.stem in ("check", "load_objective", "objective")
    return user_code.is_gristmill(path)


@dataclass(frozen=True)
class TrainingData:
    """Training and validation data, in the form that the objective's `data` names. held_out: None without validation.
    bytes_per_token by source, of the held-out and of the training text, convert nats per token to bits per byte. pieces
    and encode: of the tokenizer, for objectives that need them."""

    samples: Any
    held_out: Any
    end_of_document: int
    mask_documents: bool
    bytes_per_token: Mapping[str, float]
    training_bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    pieces: Sequence[str] = ()
    encode: Callable[[str], list[int]] | None = None
