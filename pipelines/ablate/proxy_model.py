"""A small proxy model that compares tokenizers by the bits per byte it reaches on held-out text.

Every tokenizer gets the same training text, whatever its number of tokens, and is scored per byte, so vocabularies of
any size are comparable. A tokenizer with more tokens trains for more steps of the same size."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.config import ProxyConfig
from gristmill.tokenizers.tokenizer import Tokenizer
from gristmill.tokenizers.tokenizer_report import ModelBitsPerByte, ReportText
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer

IGNORED = -100  # a target without a loss


def bits_per_byte(
    tokenizer: Tokenizer,
    training: Sequence[ReportText],
    held_out: Sequence[ReportText],
    config: ProxyConfig,
    reporter: Reporter,
    folder: Path,
) -> ModelBitsPerByte:
    """Bits per byte of the held-out text after one epoch on the training text, for each seed. Deterministic.

    folder: keeps the scores of each model, so that a comparison that was stopped goes on.

    Raises InputError if there is too little text for one batch, or no held-out text."""
    windows_NT = _windows(tokenizer, _some_texts(training, config.text_bytes), config.sequence_length)
    if len(windows_NT) < config.batch or not held_out:
        raise InputError(
            f"{len(windows_NT)} windows to train on and {len(held_out)} held-out texts are too few for a proxy model; "
            "give more text"
        )
    scored = _held_out_windows(tokenizer, held_out, config)
    identity = [config.model_dump(mode="json", exclude={"seeds"}), tokenizer.fingerprint]
    identity += [hashlib.sha256(windows.numpy().tobytes()).hexdigest() for windows in (windows_NT, scored.windows_NT)]
    by_seed = []
    for seed in range(config.seeds):
        path = folder / f"model-{fingerprint([*identity, scored.groups, seed])}.json"
        if not path.is_file():
            model = _new_model(config, tokenizer.vocab_size, seed)
            _train(model, windows_NT, config, seed, reporter)
            write_atomic(path, canonical_json(_score(model, scored, config.batch)))
        by_seed.append(json.loads(path.read_bytes()))
    return ModelBitsPerByte(
        total=tuple(sum(bits.values()) / sum(scored.num_bytes.values()) for bits in by_seed),
        groups={group: tuple(bits[group] / size for bits in by_seed) for group, size in scored.num_bytes.items()},
    )


@dataclass(frozen=True)
class HeldOutWindows:
    """windows_NT: int64[windows, sequence_length + 1], padded with IGNORED. groups: of each window. num_bytes: of the
    texts of each group."""

    windows_NT: torch.Tensor
    groups: list[str]
    num_bytes: dict[str, int]


def _held_out_windows(tokenizer: Tokenizer, texts: Sequence[ReportText], config: ProxyConfig) -> HeldOutWindows:
    """Each text by itself after the end-of-document token, in disjoint windows, up to held_out_bytes of each group."""
    length = config.sequence_length
    rows, groups = [], []
    num_bytes: dict[str, int] = {}
    for document in texts:
        size = len(document.text.encode())
        if num_bytes.get(document.group, 0) + size > config.held_out_bytes and document.group in num_bytes:
            continue
        num_bytes[document.group] = num_bytes.get(document.group, 0) + size
        ids = [tokenizer.end_of_document, *tokenizer.encode(document.text)]
        for start in range(0, len(ids) - 1, length):
            window = ids[start : start + length + 1]
            rows.append(window + [IGNORED] * (length + 1 - len(window)))
            groups.append(document.group)
    return HeldOutWindows(torch.tensor(rows, dtype=torch.int64), groups, dict(sorted(num_bytes.items())))


def _score(model: Transformer, scored: HeldOutWindows, batch: int) -> dict[str, float]:
    """Bits of the texts of each group."""
    bits = dict.fromkeys(scored.num_bytes, 0.0)
    for start in range(0, len(scored.groups), batch):
        losses = _loss(model, scored.windows_NT[start : start + batch], "none").sum(dim=1) / math.log(2)
        for group, value in zip(scored.groups[start : start + batch], losses.tolist(), strict=True):
            bits[group] += value
    return bits


def _some_texts(texts: Sequence[ReportText], limit: int) -> list[str]:
    """Texts in a keyed random order, the same for every tokenizer, until they have `limit` bytes together."""
    selected: list[str] = []
    num_bytes = 0
    for place in Permutation(len(texts), key_of("proxy texts")).whole():
        if num_bytes >= limit:
            break
        selected.append(texts[place].text)
        num_bytes += len(selected[-1].encode())
    return selected


def _windows(tokenizer: Tokenizer, texts: Sequence[str], sequence_length: int) -> torch.Tensor:
    """int64[windows, sequence_length + 1], overlapping by one token: concatenated documents."""
    ids: list[int] = [tokenizer.end_of_document]
    for text in texts:
        ids += [*tokenizer.encode(text), tokenizer.end_of_document]
    count = (len(ids) - 1) // sequence_length
    stream = torch.tensor(ids[: count * sequence_length + 1], dtype=torch.int64)
    return stream.unfold(0, sequence_length + 1, sequence_length)


def _new_model(config: ProxyConfig, vocab_size: int, seed: int) -> Transformer:
    shape = ModelConfig(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        sequence_length=config.sequence_length,
        tied_embeddings=True,
    )
    model = Transformer(shape, vocab_size)
    initialize(model, seed, torch.device("cpu"), torch.float32)
    return model


def _train(model: Transformer, windows_NT: torch.Tensor, config: ProxyConfig, seed: int, reporter: Reporter) -> None:
    """One epoch in seeded order: AdamW, warm-up over 10 % of the steps, cosine decay to 10 %."""
    steps = len(windows_NT) // config.batch
    order = Permutation(len(windows_NT), key_of(seed, "proxy")).whole()
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
    """Cross entropy, a mean, or with reduction "none" float[B, T], 0 where the target is IGNORED."""
    inputs_BT, targets_BT = windows_BT[:, :-1].clamp(min=0), windows_BT[:, 1:]
    with torch.set_grad_enabled(reduction == "mean"):
        logits_BVT = model(inputs_BT).float().transpose(1, 2)
        return functional.cross_entropy(logits_BVT, targets_BT, reduction=reduction, ignore_index=IGNORED)
