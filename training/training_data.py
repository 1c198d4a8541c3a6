"""The data of a training run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
