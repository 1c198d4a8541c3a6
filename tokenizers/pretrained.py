"""Loads pretrained tokenizers: a SentencePiece .model, a Hugging Face tokenizer.json, or tiktoken ranks."""

import base64
import hashlib
import itertools
import re
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.tokenizers.byte_level import GPT2_PATTERN, bytes_to_unicode
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.export import settings_json
from gristmill.tokenizers.tokenizer import END_SYMBOLS, JSON_NAME, MODEL_NAME, SETTINGS_NAME, end_symbol

HUB_TIMEOUT_SECONDS = 5.0


def resolve_pretrained(name: str) -> Path:
    """The tokenizer file that `tokenizer.pretrained` names: a file, a folder's, or a Hugging Face repository's.

    Raises InputError if there is none, or the hub cannot be reached."""
    path = Path(name).expanduser()
    if path.is_dir():
        for name in (JSON_NAME, MODEL_NAME):
            if (path / name).is_file():
                return path / name
        raise InputError(f"{path}: holds neither {JSON_NAME} nor {MODEL_NAME}; name the tokenizer's file itself")
    if path.is_file():
        return path
    if not is_hub_name(name):
        raise InputError(f"tokenizer.pretrained: {path}: no such file or folder; check the path")
    return _from_hub(name)


def is_hub_name(name: str) -> bool:
    """True for `gpt2` and `org/name`; False for what can only be a path: ./x, a/b/c, ~/x, x.json."""
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is not None
    return named and Path(name).suffix not in (".model", ".json", ".tiktoken")


def require_pretrained(name: str) -> None:
    """Raises InputError if the tokenizer is not on this machine, and the hub does not have it or cannot be reached."""
    path = resolve_pretrained(name)
    if path.suffix not in (".model", ".json", ".tiktoken"):
        raise InputError(f"{path}: a tokenizer is a .model, a .json or a .tiktoken file; this ends in {path.suffix!r}")


def pretrained_digest(name: str) -> str:
    """SHA-256 of the tokenizer file and of its tokenizer_config.json, if it has one."""
    path = resolve_pretrained(name)
    digest = hashlib.sha256(path.read_bytes())
    settings = path.with_name(SETTINGS_NAME)
    digest.update(settings.read_bytes() if settings.is_file() else b"")
    return digest.hexdigest()


def copy_pretrained(config: TokenizerConfig, folder: Path) -> None:
    """Copies or converts the tokenizer into `folder` under the names `load_tokenizer` reads."""
    assert config.pretrained is not None
    path = resolve_pretrained(config.pretrained)
    if path.suffix == ".model":
        write_atomic(folder / MODEL_NAME, path.read_bytes())
        return
    if path.suffix == ".tiktoken":
        content = from_ranks(path, config.pattern or GPT2_PATTERN, config.end_of_document or END_SYMBOLS[0])
        symbol = config.end_of_document or END_SYMBOLS[0]
    elif path.suffix == ".json":
        content = path.read_bytes()
        symbol = config.end_of_document or end_symbol(path, content)
    else:
        raise InputError(f"{path}: a tokenizer is a .model, a .json or a .tiktoken file; this ends in {path.suffix!r}")
    write_json(folder, content, symbol)


def write_json(folder: Path, content: bytes, end_of_document: str) -> None:
    """Writes a tokenizer.json and the tokenizer_config.json beside it."""
    write_atomic(folder / JSON_NAME, content)
    write_atomic(folder / SETTINGS_NAME, canonical_json(settings_json(end_of_document)) + b"\n")


def from_ranks(path: Path, pattern: str, end_of_document: str) -> bytes:
    """tokenizer.json of a tiktoken file: lines of base64(bytes) and rank. The end of document comes after the ranks."""
    ranks = _read_ranks(path)
    merges = [
        [bytes_to_unicode(left), bytes_to_unicode(right)]
        for token in sorted((token for token in ranks if len(token) > 1), key=lambda token: ranks[token])
        for left, right in [last_merge(token, ranks)]
    ]
    return byte_level_json(pattern, ranks, merges, [end_of_document])


def byte_level_json(
    pattern: str, ranks: Mapping[bytes, int], merges: Sequence[Sequence[str]], special: Sequence[str]
) -> bytes:
    """tokenizer.json of a byte-level BPE. merges: in visible characters. special: symbols, whose ids come after the
    ranks."""
    first = max(ranks.values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": first + place, "content": symbol} | flags for place, symbol in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {bytes_to_unicode(token): rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }
    return canonical_json(content) + b"\n"


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens of the last merge when `token` is built by merges of lower rank.

    b"abc" with ranks {ab: 0, abc: 1} -> (b"ab", b"c"). Raises InputError if no merges build it."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [(ranks.get(left + right), at) for at, (left, right) in enumerate(itertools.pairwise(parts))]
        usable = [(rank, at) for rank, at in joined if rank is not None and rank < ranks[token]]
        if not usable:
            raise InputError(f"token {token!r} of rank {ranks[token]} is not built by merges; the ranks are incomplete")
        _, at = min(usable)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not a line of base64 and rank ({error})") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(f"{path}: no rank for {len(missing)} single bytes, the first {missing[0]:#04x}; get it again")
    return ranks


def _from_hub(name: str) -> Path:
    """tokenizer.json of a hub repository, for example "gpt2": from the local cache, else downloaded.

    The hub is first probed for at most HUB_TIMEOUT_SECONDS: without a network huggingface_hub itself retries for half a
    minute."""
    from huggingface_hub import constants, hf_hub_download  # only here: it reads the environment, may open the network

    try:
        try:
            path = Path(hf_hub_download(name, JSON_NAME, local_files_only=True))
            hf_hub_download(name, SETTINGS_NAME, local_files_only=True)
        except OSError:  # not in the cache
            if constants.HF_HUB_OFFLINE:
                raise
            urllib.request.urlopen(f"{constants.ENDPOINT}/{name}/resolve/main/{JSON_NAME}", timeout=HUB_TIMEOUT_SECONDS)
            path = Path(hf_hub_download(name, JSON_NAME))
            hf_hub_download(name, SETTINGS_NAME)
        return path
    except Exception as error:  # of many kinds: no such name, no network, no rights
        raise InputError(
            f"tokenizer.pretrained={name!r} is no file or folder here, and the hub has none "
            f"({type(error).__name__}); give the path of a .model, tokenizer.json or .tiktoken file"
        ) from error
