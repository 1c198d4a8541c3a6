"""Tokenizer metrics on a set of texts, per language or source: compression, fertility, parity, round trips."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.foundation.config import Config
from gristmill.tokenizers.tokenizer import Tokenizer

# Texts per encode_batch call.
BATCH = 256


@dataclass(frozen=True)
class ReportText:
    """group: language or source. key: texts of several groups with the same key are translations of each other."""

    group: str
    text: str
    key: str = ""


class GroupReport(Config):
    """fertility: tokens per whitespace-separated word (not meaningful for Chinese, Japanese or Thai: use
    bytes_per_token and parity). parity: tokens of the group's texts divided by those of the reference group's texts
    with the same keys, the premium of Petrov et al. 2023 (arXiv:2305.15425); None if they share no key."""

    group: str
    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float
    fertility: float
    parity: float | None


class TokenizerReport(Config):
    """unused: vocabulary pieces (without bytes and control symbols) that no text used. round_trip_failures: texts that
    decode to another text. bits_per_byte: of a proxy model trained on the tokens, if one was."""

    name: str
    vocab_size: int
    encoder: str
    total: GroupReport
    groups: tuple[GroupReport, ...]
    unused: int
    round_trip_failures: int
    first_failure: str | None
    bits_per_byte: float | None = None


def tokenizer_report(
    name: str,
    tokenizer: Tokenizer,
    texts: Sequence[ReportText],
    reference: str,
    bits_per_byte: float | None = None,
) -> TokenizerReport:
    """Encodes and decodes every text. reference: the group that parity is relative to, such as "en"."""
    counts = np.zeros(len(texts), dtype=np.int64)
    used = np.zeros(tokenizer.vocab_size, dtype=bool)
    failures: list[str] = []
    for start in range(0, len(texts), BATCH):
        batch = [each.text for each in texts[start : start + BATCH]]
        for offset, ids in enumerate(tokenizer.encode_batch(batch)):
            counts[start + offset] = len(ids)
            used[ids] = True
            if tokenizer.decode(ids) != batch[offset]:
                failures.append(batch[offset])
    members: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(texts):
        members[each.group].append(number)
    by_key = _tokens_by_key(texts, counts, reference)
    text_pieces = [number for number, piece in enumerate(tokenizer.pieces) if piece and not _is_byte_or_control(piece)]
    return TokenizerReport(
        name=name,
        vocab_size=tokenizer.vocab_size,
        encoder=tokenizer.encoder,
        total=_group("all", range(len(texts)), texts, counts, {}),
        groups=tuple(_group(group, numbers, texts, counts, by_key) for group, numbers in sorted(members.items())),
        unused=int((~used[text_pieces]).sum()),
        round_trip_failures=len(failures),
        first_failure=failures[0][:80] if failures else None,
        bits_per_byte=bits_per_byte,
    )


def _group(
    group: str, numbers: Sequence[int], texts: Sequence[ReportText], counts: np.ndarray, by_key: dict[str, int]
) -> GroupReport:
    size = sum(len(texts[number].text.encode()) for number in numbers)
    words = sum(len(texts[number].text.split()) for number in numbers)
    tokens = int(counts[list(numbers)].sum())
    shared = [number for number in numbers if texts[number].key in by_key]
    in_reference = sum(by_key[texts[number].key] for number in shared)
    return GroupReport(
        group=group,
        documents=len(numbers),
        bytes=size,
        tokens=tokens,
        bytes_per_token=size / max(1, tokens),
        fertility=tokens / max(1, words),
        parity=int(counts[shared].sum()) / in_reference if in_reference else None,
    )


def _tokens_by_key(texts: Sequence[ReportText], counts: np.ndarray, reference: str) -> dict[str, int]:
    return {each.key: int(counts[n]) for n, each in enumerate(texts) if each.group == reference and each.key}


def _is_byte_or_control(piece: str) -> bool:
    """Bytes and control symbols: "<0x0A>", "<unk>", "<|endofdocument|>"."""
    return piece.startswith("<") and piece.endswith(">") and len(piece) > 2
