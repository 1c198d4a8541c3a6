"""How well a tokenizer serves a set of texts: by language or source, and between languages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.foundation.config import Config
from gristmill.tokenizers.tokenizer import Tokenizer

# Texts encoded in one go.
BATCH = 256


@dataclass(frozen=True)
class AuditText:
    """group: its language or source. key: texts of several groups with one key say the same thing (translations)."""

    group: str
    text: str
    key: str = ""


class GroupAudit(Config):
    """fertility: tokens per word, a word being what stands between spaces (so it says nothing of Chinese, Japanese or
    Thai: read bytes_per_token and parity there). parity: tokens of the group's texts over tokens of the reference's
    texts with the same keys, the premium of Petrov et al. 2023 (arXiv:2305.15425); None where they share no key."""

    group: str
    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float
    fertility: float
    parity: float | None


class Audit(Config):
    """unused: pieces of text (no bytes, no control symbols) that no text needed. round_trip_failures: texts that do
    not come back as they were. bits_per_byte: of a small model trained on the tokens, where one was."""

    name: str
    vocab_size: int
    encoder: str
    total: GroupAudit
    groups: tuple[GroupAudit, ...]
    unused: int
    round_trip_failures: int
    first_failure: str | None
    bits_per_byte: float | None = None


def audit(
    name: str,
    tokenizer: Tokenizer,
    texts: Sequence[AuditText],
    reference: str,
    bits_per_byte: float | None = None,
) -> Audit:
    """Encodes and decodes every text. reference: the group that parity compares with, such as "en"."""
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
    text_pieces = [number for number, piece in enumerate(tokenizer.pieces) if piece and not _is_sign(piece)]
    return Audit(
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
    group: str, numbers: Sequence[int], texts: Sequence[AuditText], counts: np.ndarray, by_key: dict[str, int]
) -> GroupAudit:
    size = sum(len(texts[number].text.encode()) for number in numbers)
    words = sum(len(texts[number].text.split()) for number in numbers)
    tokens = int(counts[list(numbers)].sum())
    shared = [number for number in numbers if texts[number].key in by_key]
    in_reference = sum(by_key[texts[number].key] for number in shared)
    return GroupAudit(
        group=group,
        documents=len(numbers),
        bytes=size,
        tokens=tokens,
        bytes_per_token=size / max(1, tokens),
        fertility=tokens / max(1, words),
        parity=int(counts[shared].sum()) / in_reference if in_reference else None,
    )


def _tokens_by_key(texts: Sequence[AuditText], counts: np.ndarray, reference: str) -> dict[str, int]:
    return {each.key: int(counts[n]) for n, each in enumerate(texts) if each.group == reference and each.key}


def _is_sign(piece: str) -> bool:
    """Bytes and control symbols: "<0x0A>", "<unk>", "<|endofdocument|>"."""
    return piece.startswith("<") and piece.endswith(">") and len(piece) > 2
