"""Small raw corpora on disk, and one call that curates them."""

from pathlib import Path

import numpy as np
import orjson

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine

VOCABULARY = """the of and to that have with be water stone river miller wheel grain flour sack cart road market
morning winter summer bread oven fire baker child song door window roof house field plough horse rain cloud wind"""
WORDS = VOCABULARY.split()


def prose(number: int, words: int = 120) -> str:
    """A text that passes Gopher's rules, the same for the same number, sharing no 5-grams with another's."""
    drawn = np.random.default_rng([7, number]).choice(WORDS, size=words)
    sentences = [" ".join(drawn[i : i + 12]).capitalize() + "." for i in range(0, words, 12)]
    return "\n".join(sentences)


def write_jsonl(path: Path, records: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((r if isinstance(r, bytes) else orjson.dumps(r)) + b"\n" for r in records))
    return path


def run_curate(sources: list[SourceConfig], folder: Path, workers: int = 1, seed: int = 1, **settings) -> dict:
    """Locks and curates into folder/curate on this machine; returns the counts."""
    return curate_with(LocalEngine(workers, Reporter.silent()), sources, folder, seed, **settings)


def curate_with(engine: Engine, sources: list[SourceConfig], folder: Path, seed: int = 1, **settings) -> dict:
    """Locks and curates into folder/curate; returns the counts."""
    lock = Lock(sources=tuple(resolve(sources, engine)))
    config = CurateConfig(**settings)
    return curate(CurationInputs(sources, config, seed, lock, folder / "curate", folder / "cache", engine))


def tree_digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): file_digest(p) for p in sorted(folder.rglob("*")) if p.is_file()}
