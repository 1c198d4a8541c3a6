"""Corpora that keep their signatures, and are protected from later ones by them."""

from pathlib import Path

from gristmill.data_pipeline.dedup.near import NearDedupConfig, Protected
from gristmill.data_pipeline.dedup.signatures import (
    STORE_FOLDER,
    SignatureScheme,
    SignatureStore,
    find_store,
    open_store,
    same_scheme,
    sign_corpus,
)
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import InputError


def corpus_document_files(corpus: Path) -> list[DocumentFile]:
    """The files of a curated corpus, documents/SPLIT/SOURCE-NUMBER.parquet.

    Raises InputError if there are none."""
    paths = sorted((corpus / "documents").glob("*/*.parquet"))
    if not paths:
        raise InputError(f"{corpus}: no documents/*/*.parquet; name the folder that `gristmill curate` filled")
    return [DocumentFile(path, path.stem.rpartition("-")[0], priority=1) for path in paths]


def keep_signatures(corpus: Path, scheme: SignatureScheme, engine: Engine) -> SignatureStore:
    """The folder `signatures` of a curated corpus: a store of all documents that stand in it."""
    return sign_corpus(corpus_document_files(corpus), scheme, engine, corpus / STORE_FOLDER, is_kept=True)


def protected_corpora(config: NearDedupConfig | None) -> list[Protected]:
    """The corpora that the config protects. Raises InputError for one without a store, or of another scheme."""
    found = []
    for folder in config.protected if config is not None else ():
        store = open_store(find_store(folder))
        assert config is not None
        same_scheme(config.scheme, store.scheme, store.folder)
        found.append(Protected(store.folder, store.document_files()))
    return found
