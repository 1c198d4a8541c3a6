"""The Tokenizer class (text to ids and back) and its loaders."""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.kernels.kernel_files import kernel_folder, read_kernel, source_digest, write_kernel
from gristmill.tokenizers.byte_level import (
    BULK_ENCODERS,
    GigatokenEncoder,
    bytes_of_visible,
    fastest_byte_level,
    gigatoken_encoder,
    mask_of,
    raw_without_added_tokens,
)
from gristmill.tokenizers.config import FIM_SYMBOLS, SPACE
from gristmill.tokenizers.encoders import (
    Encoder,
    HuggingFaceEncoder,
    KitokenEncoder,
    SentencePieceEncoder,
    fastest_matching_encoder,
    fastest_verified_encoder,
    first_difference,
    merge_table,
    verification_strings,
)
from gristmill.tokenizers.segments import MERGES, SEGMENTS, SegmentEncoder, adjacent_bytes, is_local
from gristmill.tokenizers.words import fastest_by_words, word_encoder
from tokenizers import Tokenizer as HuggingFaceTokenizer

# Decoding by a table of bytes: the text of a token is its bytes, wherever it stands.
#
# That holds for byte-level BPE and for SentencePiece models that put no space in front. Ids whose bytes are no UTF-8
# together, and unknown ids, are decoded by the reference: libraries differ in their replacement characters.


BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
NORMAL, USER_DEFINED, BYTE = 1, 4, 6  # SentencePiece.Type


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None if its text depends on its neighbours."""
        return None


class ModelDecoder(Decoder):
    """A SentencePiece model's own decoding."""

    def __init__(self, processor: Any):
        self._processor = processor

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(token) for token in ids])
        return text


class ByteTableDecoder(Decoder):
    """table: bytes by id. stripped_spaces: at most so many are removed in
    front of a text."""

    def __init__(self, table: dict[int, bytes], reference: Decoder, stripped_spaces: int = 0):
        self._table, self._reference, self._stripped_spaces = table, reference, stripped_spaces

    def bytes_of(self, token: int) -> bytes | None:
        return None if self._stripped_spaces else self._table.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            text = b"".join(map(self._table.__getitem__, ids)).decode()
        except (KeyError, UnicodeDecodeError):
            return self._reference.decode(ids)
        for _ in range(self._stripped_spaces):
            text = text.removeprefix(SPACE)
        return text


def json_decoder(content: dict[str, Any], pieces: Sequence[str], skipped: set[int], reference: Decoder) -> Decoder:
    """The table of a tokenizer.json whose decoder works token by token, else the reference. skipped: ids without
    text."""
    steps = _steps(content.get("decoder"))
    stripped = 0
    if steps and steps[-1]["type"] == "Strip" and any(step["type"] == "Fuse" for step in steps[:-1]):
        if steps[-1]["content"] != SPACE or steps[-1]["stop"]:
            return reference
        stripped = steps.pop()["start"]
    if steps and steps[-1]["type"] == "Fuse":
        steps.pop()
    kinds = [step["type"] for step in steps]
    is_byte_level, byte_fallback = kinds == ["ByteLevel"], kinds[-1:] == ["ByteFallback"]
    added = (content.get("added_tokens") or []) if content.get("normalizer") else []
    normalized = {token["id"] for token in added if token["normalized"]}  # decoded to their normalized text
    replacements = [] if is_byte_level else steps[: len(steps) - byte_fallback]
    if not steps or any(step["type"] != "Replace" or "String" not in step["pattern"] for step in replacements):
        return reference
    table = {}
    for token, piece in enumerate(pieces):
        if token in normalized:
            continue
        if is_byte_level:
            known = bytes_of_visible(piece)
            table[token] = piece.encode() if known is None else known
        else:
            for step in replacements:
                piece = piece.replace(step["pattern"]["String"], step["content"])
            byte = BYTE_PIECE.fullmatch(piece) if byte_fallback else None
            table[token] = bytes.fromhex(byte[1]) if byte else piece.encode()
    return ByteTableDecoder(table | dict.fromkeys(skipped, b""), reference, stripped)


def model_decoder(proto: Any, reference: Decoder) -> Decoder:
    """The table of a SentencePiece model (its ModelProto) without a space in front and case marks, else the
    reference. Control symbols are not in it: the bytes around one are no character."""
    spec = proto.normalizer_spec
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces or proto.denormalizer_spec.precompiled_charsmap:
        return reference
    table = {}
    for token, piece in enumerate(proto.pieces):
        if piece.type in (NORMAL, USER_DEFINED):
            table[token] = piece.piece.replace("▁", SPACE).encode()
        elif piece.type == BYTE:
            table[token] = bytes.fromhex(piece.piece[3:5])
    return ByteTableDecoder(table, reference)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
# End-of-document symbols of published tokenizers: GPT-2, Llama 3, Llama 1, Qwen, Gemma, BERT.
END_SYMBOLS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]", "<|endofdocument|>")


class Tokenizer:
    """encoder: name of the encoding library. differing: code points that it does not encode itself. fingerprint: of the
    file that defines the ids.

    decode(encode(text)) == text for tokenizers trained by gristmill, except that U+2581 decodes to a space (it is
    SentencePiece's symbol for one)."""

    def __init__(
        self, encoder: Encoder, decoder: Decoder, pieces: Sequence[str], end_of_document: int, fingerprint: str
    ):
        self._encoder, self._decoder = encoder, decoder
        self.pieces = tuple(pieces)
        self.vocab_size = len(self.pieces)
        self.end_of_document = end_of_document
        self.fingerprint = fingerprint
        self.encoder = encoder.name
        self.differing = encoder.differing

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a generated text."""
        return (self.end_of_document,)

    def encode(self, text: str) -> list[int]:
        """The ids, without begin or end symbols; control symbols in the text are encoded as plain text.

        Raises InputError on a lone surrogate, which is invalid in UTF-8."""
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            raise _surrogate(error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return self._encoder.encode_batch(texts)
        except UnicodeEncodeError as error:
            raise _surrogate(error) from error

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts concatenated: int32; lengths: int64[len(texts)]), for bulk encoding."""
        try:
            return self._encoder.encode_flat(texts)
        except UnicodeEncodeError as error:
            raise _surrogate(error) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; control symbols are skipped, bytes that are invalid UTF-8 give U+FFFD."""
        return self._decoder.decode(ids)

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token, whose text they are wherever it stands; None if its text depends on its neighbours."""
        return self._decoder.bytes_of(token)

    def id_of(self, piece: str) -> int | None:
        """The id of a piece, None if the vocabulary lacks it."""
        try:
            return self.pieces.index(piece)
        except ValueError:
            return None

    def fim_ids(self) -> tuple[int, int, int] | None:
        """Ids of the prefix, middle and suffix symbols, None unless all three exist."""
        prefix, middle, suffix = (self.id_of(symbol) for symbol in FIM_SYMBOLS)
        if prefix is None or middle is None or suffix is None:
            return None
        return prefix, middle, suffix


# Ids of published tokenizers are dense but for reserved ones; a list of all ids up to the highest is held in memory.
MAX_ID_RATIO, MIN_VOCABULARY = 8, 1024


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer` folder: its .model if it has one, else its tokenizer.json; that wins where it has
    tokens that the .model lacks.

    Uses the fastest encoder that passes the comparison with sentencepiece's ids. Raises InputError if the folder
    holds neither file, or no end-of-document symbol."""
    return _load(folder, fastest_verified_encoder, lambda content, reference: reference)


def load_bulk_tokenizer(
    folder: Path, encoder: str | None = None, differing: tuple[tuple[int, int], ...] = ()
) -> Tokenizer:
    """The tokenizer for encoding a corpus: encoding is many times as fast. The first time, comparing the encoders takes
    up to ten seconds; the choice is kept for these files, this code and these libraries.

    encoder, differing: use this one without comparing it."""
    if encoder is not None:
        return _load(
            folder,
            lambda path, processor, pieces: _by_name(path, processor, pieces, encoder),
            lambda content, reference: _json_by_name(content, reference, encoder, differing),
        )
    path = choice_path(folder)
    kept = None if path is None else read_kernel(path)
    if kept is not None:
        name, ranges = json.loads(kept)
        return load_bulk_tokenizer(folder, name, tuple((first, stop) for first, stop in ranges))
    tokenizer = _load(folder, _fastest_in_bulk, _fastest_json)
    if path is not None:
        write_kernel(path, canonical_json([tokenizer.encoder, tokenizer.differing]))
    return tokenizer


def load_encoder(folder: Path, name: str, differing: tuple[tuple[int, int], ...] = ()) -> Encoder:
    """The encoder alone that a parent process compared and chose, for a worker: at 128,000 pieces of a byte-level BPE
    in a third of the time of the tokenizer, whose decoder, pieces and fingerprint a worker does not need."""
    if name == GigatokenEncoder.name and differing:
        path = folder / JSON_NAME
        content = raw_without_added_tokens(path.read_bytes())
        return GigatokenEncoder(content, HuggingFaceEncoder(path), mask_of(differing))
    return load_bulk_tokenizer(folder, name, differing)._encoder


def choice_path(folder: Path) -> Path | None:
    """The file that keeps which encoder was compared and chosen, beside the compiled kernels; named by all that decides
    it. None where nothing can be kept."""
    root = kernel_folder()
    if root is None:
        return None
    files = [folder / name for name in (MODEL_NAME, JSON_NAME, SETTINGS_NAME)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in files]
    libraries = [version(name) for name in ("sentencepiece", "kitoken", "tokenizers", "tiktoken", "gigatoken")]
    key = canonical_json([digests, libraries, source_digest(__name__, Path(__file__)), platform.platform()])
    return root / f"encoder-{hashlib.sha256(key).hexdigest()[:40]}.choice"


Choose = Callable[[Path, sentencepiece.SentencePieceProcessor, Sequence[str]], Encoder]
ChooseJson = Callable[[dict[str, Any], HuggingFaceEncoder], Encoder]


def _load(folder: Path, choose: Choose, choose_json: ChooseJson) -> Tokenizer:
    has_model, has_json = (folder / MODEL_NAME).is_file(), (folder / JSON_NAME).is_file()
    if has_model and not (has_json and _adds_tokens(folder / JSON_NAME, folder / MODEL_NAME)):
        return _from_model(folder / MODEL_NAME, choose)
    if has_json:
        return _from_json(folder / JSON_NAME, choose_json)
    raise InputError(f"{folder}: neither {MODEL_NAME} nor {JSON_NAME}; not a tokenizer folder")


def _adds_tokens(json_path: Path, model_path: Path) -> bool:
    """Whether a tokenizer.json has added tokens behind the pieces of the .model beside it, as models have that were
    trained on for chat. False for a damaged file, whose reader names the damage."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model_path.read_bytes())
        added = [token["id"] for token in json.loads(json_path.read_bytes()).get("added_tokens") or []]
        return max(added, default=0) >= processor.vocab_size()
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _fastest_in_bulk(path: Path, processor: sentencepiece.SentencePieceProcessor, pieces: Sequence[str]) -> Encoder:
    strings = verification_strings(pieces)
    expected = SentencePieceEncoder(processor).encode_batch(strings)
    inner = fastest_matching_encoder(path, processor, strings, expected)
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    if not is_local(proto):
        return inner
    for merges in dict.fromkeys((merge_table(proto), None)):
        segments = SegmentEncoder(inner, adjacent_bytes(pieces), merges)
        if first_difference(expected * 2, segments, strings * 2) is None:  # the second time from the cache
            return segments
    return inner


def _fastest_json(content: dict[str, Any], reference: HuggingFaceEncoder) -> Encoder:
    """gigatoken or tiktoken for a plain byte-level BPE, else cached words; each if its ids are equal."""
    return fastest_byte_level(content, reference) or fastest_by_words(content, reference) or reference


def _by_name(path: Path, processor: sentencepiece.SentencePieceProcessor, pieces: Sequence[str], name: str) -> Encoder:
    inner = KitokenEncoder(path) if name.endswith(KitokenEncoder.name) else SentencePieceEncoder(processor)
    if not name.startswith(SEGMENTS):
        return inner
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    return SegmentEncoder(inner, adjacent_bytes(pieces), merge_table(proto) if MERGES in name else None)


def _json_by_name(
    content: dict[str, Any], reference: HuggingFaceEncoder, name: str, differing: tuple[tuple[int, int], ...]
) -> Encoder:
    """Raises InputError if the file was replaced since its encoder was chosen."""
    if name == reference.name:
        return reference
    if name.startswith(SEGMENTS):
        fast: Encoder | None = word_encoder(content)
    elif name == GigatokenEncoder.name:
        fast = gigatoken_encoder(content, reference, differing)
    else:
        fast = BULK_ENCODERS[name](content, reference)
    if fast is None:
        raise InputError(f"{JSON_NAME}: {name} cannot encode it, so the file was replaced; run the same command again")
    return fast


def _from_model(path: Path, choose: Choose) -> Tokenizer:
    content = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise InputError(f"{path}: not a SentencePiece model ({error})") from error
    end = processor.eos_id()
    if end < 0:
        raise InputError(f"{path}: has no end-of-sentence piece to end documents with; train it with one")
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    pieces = [piece.piece for piece in proto.pieces]
    if not all(isinstance(piece, str) for piece in pieces):  # protobuf gives bytes for what is no UTF-8
        raise InputError(f"{path}: a piece is not UTF-8, so the file is damaged; fetch it again")
    fingerprint = hashlib.sha256(content).hexdigest()[:32]
    decoder = model_decoder(proto, ModelDecoder(processor))
    return Tokenizer(choose(path, processor, pieces), decoder, pieces, end, fingerprint)


class _SkippingDecoder(Decoder):
    """Hugging Face's decoder, skipping control symbols."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, skipped: set[int]):
        self._tokenizer, self._skipped = tokenizer, skipped

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(token) for token in ids if int(token) not in self._skipped]
        return self._tokenizer.decode(kept, skip_special_tokens=True)


def _from_json(path: Path, choose: ChooseJson) -> Tokenizer:
    content = path.read_bytes()
    try:
        tokenizer = HuggingFaceTokenizer.from_str(content.decode())
    except Exception as error:  # the package raises plain Exception, and UnicodeDecodeError comes from us
        raise InputError(f"{path}: not a tokenizer.json that Hugging Face's tokenizers reads ({error})") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise InputError(f"{path}: has no pieces; fetch the file again")
    highest = max(vocabulary.values())
    if highest >= MAX_ID_RATIO * max(len(vocabulary), MIN_VOCABULARY):
        raise InputError(
            f"{path}: the id {highest} is far beyond its {len(vocabulary)} pieces, so one of its numbers is damaged; "
            "fetch the file again"
        )
    pieces = [""] * (max(vocabulary.values()) + 1)
    for piece, number in vocabulary.items():
        pieces[number] = piece
    end = end_symbol(path, content)
    if end not in vocabulary:
        raise InputError(
            f"{path}: its end-of-document symbol {end!r} is not in the vocabulary; set tokenizer.end_of_document"
        )
    fields = json.loads(content)
    defining = canonical_json(fields | {"post_processor": None})  # which adds tokens around a text: an export's differs
    digest = hashlib.sha256(defining + end.encode()).hexdigest()[:32]
    skipped = {token["id"] for token in fields.get("added_tokens") or [] if token["special"]} | {vocabulary[end]}
    decoder = json_decoder(fields, pieces, skipped, _SkippingDecoder(tokenizer, {vocabulary[end]}))
    encoder = choose(fields, HuggingFaceEncoder(tokenizer))
    return Tokenizer(encoder, decoder, pieces, vocabulary[end], digest)


def end_symbol(path: Path, content: bytes) -> str:
    """The end-of-document symbol of a tokenizer.json: the eos_token of the tokenizer_config.json beside it, else the
    first of END_SYMBOLS among its added tokens. Raises InputError if there is neither."""
    settings = path.with_name(SETTINGS_NAME)
    symbol = read_settings(settings).get("eos_token")
    symbol = symbol.get("content") if isinstance(symbol, dict) else symbol
    if isinstance(symbol, str):
        return symbol
    try:
        added = {token["content"] for token in json.loads(content).get("added_tokens", [])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or of another shape
        raise InputError(f"{path}: not a tokenizer.json ({error})") from error
    if symbol := next((symbol for symbol in END_SYMBOLS if symbol in added), ""):
        return symbol
    raise InputError(
        f"{path}: {SETTINGS_NAME} beside it names no eos_token, and none of {END_SYMBOLS} is among its added tokens "
        f"{sorted(added)[:8]}; set tokenizer.end_of_document"
    )


def read_settings(path: Path) -> dict[str, Any]:
    """The fields of a tokenizer_config.json; none without the file. Raises InputError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path}: is not a JSON object; fetch the file again")
    return fields


def _surrogate(error: UnicodeEncodeError) -> InputError:
    return InputError(
        f"the text holds a lone surrogate U+{ord(error.object[error.start]):04X} at character {error.start}; "
        "it is invalid Unicode: replace it when the document is read"
    )
