"""Canonical JSON and fingerprints: equal values give equal bytes on every machine."""

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

DIGEST_FIELD = "digest"  # in manifests and locks, which hold the digests of other files


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8. {"b": 1, "a": [True]} -> b'{"a":[true],"b":1}'.

    Raises TypeError on values without a unique form (a set, a path, an object, a key that is not a string) and
    ValueError on NaN and infinities; str(x) of such values could give different fingerprints on different machines."""
    if not _is_canonical(value):
        _check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(value: Any) -> str:
    """32 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]


def digested_json(value: dict[str, Any]) -> bytes:
    """Canonical JSON and a line end, with a field `digest` added: the SHA-256 of the canonical JSON of the others."""
    return b"".join(digested_parts(value))


def digested_parts(value: dict[str, Any]) -> list[bytes]:
    """`digested_json` in parts, of which each field's value is one: a lock of a million files has 140 MB."""
    members = {name: canonical_json(inner) for name, inner in value.items()}
    digest = hashlib.sha256()
    for part in _object(members):
        digest.update(part)
    return [*_object(members | {DIGEST_FIELD: canonical_json(digest.hexdigest())}), b"\n"]


def read_digested_json(content: bytes) -> dict[str, Any]:
    """The value that `digested_json` wrote. Raises ValueError if any byte was changed."""
    try:
        document = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict) or DIGEST_FIELD not in document:
        raise ValueError(f"it has no field `{DIGEST_FIELD}`, so changes cannot be detected")
    value = {name: inner for name, inner in document.items() if name != DIGEST_FIELD}
    try:
        written = digested_parts(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"altered after it was written ({error})") from error
    places = accumulate(map(len, written), initial=0)
    if len(content) != sum(map(len, written)) or not all(
        content.startswith(part, place) for part, place in zip(written, places, strict=False)
    ):
        raise ValueError("altered after it was written: its digest differs")
    return value


def _object(members: dict[str, bytes]) -> list[bytes]:
    """Parts of the canonical JSON of an object. members: JSON of the value by name."""
    parts: list[bytes] = []
    for name in sorted(members):
        parts += [b"," if parts else b"{", canonical_json(name), b":", members[name]]
    return [*(parts or [b"{"]), b"}"]


def differing_fields(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two JSON values differ, named by path: "curate.near_dedup.rows: 8 -> 4"."""
    if isinstance(old, dict) and isinstance(new, dict):
        differences = []
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            differences += differing_fields(old.get(key), new.get(key), inner)
        return differences
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        differences = []
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            differences += differing_fields(left, right, f"{path}.{index}")
        return differences
    return [] if old == new else [f"{path}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_canonical(value: Any) -> bool:
    """False for what `_check` refuses, and for subclasses of the plain types. Makes no names: a fifth of its time."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_canonical(inner) for key, inner in value.items())
    if kind is list or kind is tuple:
        return all(map(_is_canonical, value))
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is str or kind is int or kind is bool


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            _check(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} has no JSON form")
    elif value is not None and not isinstance(value, str | int | bool):
        raise TypeError(f"{where}: {type(value).__name__} has no canonical JSON form")


# SplitMix64's increment and finalizer (Steele, Lea and Flood 2014): mixes 64-bit words for hashes and permutations.

INCREMENT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def mix(word: int) -> int:
    """The finalizer: every bit of the result depends on every bit of the word. 0 <= word < 2**64."""
    word = ((word ^ (word >> 30)) * MULTIPLIER_1) & _MASK
    word = ((word ^ (word >> 27)) * MULTIPLIER_2) & _MASK
    return word ^ (word >> 31)


def mix_array(words: np.ndarray) -> np.ndarray:
    """`mix` of every element of a uint64 array; the shape stays the same."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return words ^ (words >> np.uint64(31))


# Registers by which the number of different values is estimated (Flajolet et al. 2007).

HLL_BITS = 11  # 2,048 registers: a standard error of 2.3 % (1.04 / sqrt(2048))


def hyperloglog(names: Sequence[str]) -> np.ndarray:
    """int64[2**HLL_BITS]: the registers of these values (Flajolet et al. 2007), of which the maximum is a union's."""
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(name.encode()) for name in names), np.uint64, len(names))
    registers = np.zeros(1 << HLL_BITS, np.int64)
    rest = hashes << np.uint64(HLL_BITS) | np.uint64(1 << (HLL_BITS - 1))  # the bit ends the count of zeros
    ranks = 64 - np.floor(np.log2(rest.astype(np.float64))).astype(np.int64)
    np.maximum.at(registers, (hashes >> np.uint64(64 - HLL_BITS)).astype(np.int64), ranks)
    return registers


def distinct_estimate(registers: np.ndarray) -> int:
    """The number of different values behind these registers, with linear counting where most are empty."""
    size = len(registers)
    estimate = 0.7213 / (1 + 1.079 / size) * size * size / float((2.0 ** -registers.astype(np.float64)).sum())
    empty = int((registers == 0).sum())
    return round(size * np.log(size / empty)) if estimate <= 2.5 * size and empty else round(estimate)
