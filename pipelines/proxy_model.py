"""A small proxy model that compares tokenizers by the bits per byte it reaches on held-out text.

Every tokenizer gets the same training text, whatever its number of tokens, and is scored per byte, so vocabularies of
any size are comparable."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.proxy_model_config import ProxyConfig
from gristmill.tokenizers.tokenizer import Tokenizer
from gristmill.training.model.initialization import initialise
from gristmill.training.model.transformer import Transformer
from gristmill.training.model_config import ModelConfig


def bits_per_byte(
    tokenizer: Tokenizer, training: Sequence[str], held_out: Sequence[str], config: ProxyConfig, reporter: Reporter
) -> float:
    """Bits per byte of the held-out text after one epoch on the training text. Deterministic.

    Raises InputError if there is too little text for one batch, or no held-out text."""
    windows_NT = _windows(tokenizer, training, config.text_bytes, config.sequence_length)
    held_out_NT = _windows(tokenizer, held_out, config.held_out_bytes, config.sequence_length)
    if len(windows_NT) < config.batch or not len(held_out_NT):
        raise InputError(
            f"{len(windows_NT)} windows to train on and {len(held_out_NT)} held out are too few for a proxy model; "
            "give more text"
        )
    model = _new_model(config, tokenizer.vocab_size)
    _train(model, windows_NT, config, reporter)
    nats = sum(
        float(_loss(model, held_out_NT[at : at + config.batch], "sum"))
        for at in range(0, len(held_out_NT), config.batch)
    )
    num_bytes = sum(len(tokenizer.decode(window[1:].tolist()).encode()) for window in held_out_NT)
    return nats / math.log(2) / num_bytes


def _windows(tokenizer: Tokenizer, texts: Sequence[str], limit: int, sequence_length: int) -> torch.Tensor:
    """int64[windows, sequence_length + 1], overlapping by one token: concatenated documents, up to `limit` bytes."""
    ids: list[int] = [tokenizer.end_of_document]
    num_bytes = 0
    for text in texts:
        if num_bytes >= limit:
            break
        num_bytes += len(text.encode())
        ids += [*tokenizer.encode(text), tokenizer.end_of_document]
    count = (len(ids) - 1) // sequence_length
    stream = np.array(ids[: count * sequence_length + 1], dtype=np.int64)
    return (
        torch.from_numpy(
            np.stack([stream[at * sequence_length : (at + 1) * sequence_length + 1] for at in range(count)])
        )
        if count
        else torch.empty((0, sequence_length + 1), dtype=torch.int64)
    )


def _new_model(config: ProxyConfig, vocab_size: int) -> Transformer:
    shape = ModelConfig(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        sequence_length=config.sequence_length,
        tied_embeddings=True,
    )
    model = Transformer(shape, vocab_size)
    initialise(model, config.seed, torch.device("cpu"), torch.float32)
    return model


def _train(model: Transformer, windows_NT: torch.Tensor, config: ProxyConfig, reporter: Reporter) -> None:
    """One epoch in seeded order: AdamW, warm-up over 10 % of the steps, cosine decay to 10 %."""
    steps = len(windows_NT) // config.batch
    order = Permutation(len(windows_NT), key_of(config.seed, "proxy")).whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    with reporter.meter("proxy model", steps, "steps") as meter:
        for step in range(steps):
            progress = step / steps
            rate = min(1.0, 10 * (step + 1) / steps) * (0.55 + 0.45 * math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = config.learning_rate * rate
            loss = _loss(model, windows_NT[order[step * config.batch : (step + 1) * config.batch]], "mean")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            meter.advance(1, f"loss {loss.item():.3f}")


def _loss(model: Transformer, windows_BT: torch.Tensor, reduction: str) -> torch.Tensor:
    with torch.set_grad_enabled(reduction == "mean"):
        logits_BTV = model(windows_BT[:, :-1])
        return functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(), windows_BT[:, 1:].flatten(), reduction=reduction
        )
