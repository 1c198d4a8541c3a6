"""`gristmill tokenizer compare`: strategies and existing tokenizers side by side on one set of texts."""

from collections.abc import Sequence
from pathlib import Path

from gristmill.data_pipeline.indexed.documents import document_ranges, read
from gristmill.data_pipeline.indexed.permutation import key_of
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.foundation.lock import RawFile
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.proxy_model_config import ProxyConfig
from gristmill.tokenizers.audit import Audit, AuditText, audit
from gristmill.tokenizers.config import STRATEGIES, TokenizerConfig
from gristmill.tokenizers.tokenizer import MODEL_NAME, Tokenizer, load_tokenizer
from gristmill.tokenizers.train import train

# One text in so many is held out, by a hash of its key: translations of one text stay on one side.
HELD_OUT = 10


def compare(
    texts: Sequence[AuditText],
    folder: Path,
    strategies: Sequence[str],
    existing: Sequence[Path],
    vocab_size: int,
    reference: str,
    proxy: ProxyConfig | None,
    reporter: Reporter,
) -> list[Audit]:
    """One audit a candidate, on the held-out texts: strategies are trained into FOLDER/NAME, existing ones loaded.

    Raises RecipeError on an unknown strategy, InputError where the texts do not support the vocabulary."""
    if unknown := sorted(set(strategies) - STRATEGIES.keys()):
        raise RecipeError(f"no strategy {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    training, held_out = _split(texts)
    found = []
    for name in [*strategies, *map(str, existing)]:
        tokenizer = _trained(name, training, folder, vocab_size) if name in STRATEGIES else load_tokenizer(Path(name))
        bits = None
        if proxy is not None:
            from gristmill.pipelines.proxy_model import (
                bits_per_byte,  # loaded here: it brings torch, which takes seconds
            )

            shown, hidden = [each.text for each in training], [each.text for each in held_out]
            bits = bits_per_byte(tokenizer, shown, hidden, proxy, reporter)
        found.append(audit(name, tokenizer, held_out, reference, bits))
        reporter.say(f"{name}: {found[-1].total.bytes_per_token:.3f} bytes a token")
    return found


def read_texts(path: Path) -> list[AuditText]:
    """Texts of a `curate` folder (all documents of its train split; group: the language, else the source) or of a
    .jsonl, .jsonl.gz or .jsonl.zst file with fields `text`, `language` and, where it has one, `path`: two texts are
    translations of each other if the last two parts of their paths agree.

    Raises InputError if there are none."""
    found = _of_corpus(path) if path.is_dir() else _of_file(path)
    if not found:
        raise InputError(f"{path}: no texts; name a curate folder, or a .jsonl file with the fields text and language")
    return found


def rows(audits: Sequence[Audit]) -> list[list[str]]:
    """A table of the candidates: a header and a row each."""
    table = [["tokenizer", "pieces", "encoder", "bytes/token", "tokens/word", "unused", "failures", "bits/byte"]]
    for each in audits:
        bits = "" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}"
        rates = [f"{each.total.bytes_per_token:.3f}", f"{each.total.fertility:.3f}"]
        counts = [f"{each.unused}", f"{each.round_trip_failures}"]
        table.append([each.name, f"{each.vocab_size}", each.encoder, *rates, *counts, bits])
    return table


GROUP_FIGURES = {"bytes_per_token": "bytes/token", "fertility": "tokens/word", "parity": "parity"}


def group_rows(audits: Sequence[Audit], figure: str) -> list[list[str]]:
    """A table of one figure (of GROUP_FIGURES): a header, and a row a language or source with a column a candidate."""
    table = [[GROUP_FIGURES[figure], "documents", *(each.name for each in audits)]]
    for number, group in enumerate(audits[0].groups):
        values = [getattr(each.groups[number], figure) for each in audits]
        table.append(
            [group.group, f"{group.documents}", *("" if value is None else f"{value:.2f}" for value in values)]
        )
    return table


def _split(texts: Sequence[AuditText]) -> tuple[list[AuditText], list[AuditText]]:
    held = [key_of("compare", each.key or each.text) % HELD_OUT == 0 for each in texts]
    training = [each for each, out in zip(texts, held, strict=True) if not out]
    return training, [each for each, out in zip(texts, held, strict=True) if out]


def _trained(strategy: str, texts: Sequence[AuditText], folder: Path, vocab_size: int) -> Tokenizer:
    config = TokenizerConfig(strategy=strategy, vocab_size=vocab_size)
    write_atomic(folder / strategy / MODEL_NAME, train((each.text for each in texts), config))
    return load_tokenizer(folder / strategy)


def _of_corpus(corpus: Path) -> list[AuditText]:
    sources = sorted({path.name.rsplit("-", 1)[0] for path in (corpus / "documents" / "train").glob("*.parquet")})
    found = []
    for source in sources:
        for part in document_ranges(corpus, "train", source):
            table = read(part, "text", "language")
            pairs = zip(table["text"].to_pylist(), table["language"].to_pylist(), strict=True)
            found += [AuditText(language or source, text) for text, language in pairs if text]
    return found


def _of_file(path: Path) -> list[AuditText]:
    if not path.is_file():
        raise InputError(f"{path}: no such file or folder")
    source = SourceConfig(name="texts", format="jsonl", paths=(str(path),))
    raw = RawFile(name=str(path), bytes=path.stat().st_size, sha256=file_digest(path))
    records = [record for record in read_range(FileRange(raw, str(path)), source) if isinstance(record, Record)]
    return [
        AuditText(
            record.language or "unknown", record.text, "/".join(str(record.metadata.get("path", "")).split("/")[-2:])
        )
        for record in records
        if record.text
    ]
