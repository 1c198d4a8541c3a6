"""Evaluation of a work folder: results files, held-out tasks, deterministic bytes."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.indexed.format import indexed_writer
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.workdir import CheckpointPaths, HeldOutCorpus
from gristmill.evaluation.results.statistics import unigram_bits_per_byte
from gristmill.evaluation.run import EvaluationPaths, evaluate_folder
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.tokenizers.tokenizer import load_tokenizer

CONFIG = EvaluateConfig(cloze_items=20, text_bytes=2000, num_continuations=2, continuation_tokens=8)


def document(source: str, number: int) -> str:
    return "\n".join(f"{source} {number} says in line {line} that the mill turns" for line in range(12))


@pytest.fixture
def corpus(tmp_path: Path, tokenizer_folder: Path) -> HeldOutCorpus:
    """The folders `curate` and `index` of a run, with two sources of five held-out documents."""
    tokenizer = load_tokenizer(tokenizer_folder)
    for source in ("code", "prose"):
        texts = [document(source, number) for number in range(5)]
        columns = {"doc_id": [f"{source}{i}" for i in range(5)], "source": [source] * 5, "text": texts}
        table = pa.table({**columns, "language": ["de", "en", "en", "en", "en"]})
        path = tmp_path / "curate" / "documents" / "test" / f"{source}-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        (tmp_path / "index" / "train").mkdir(parents=True, exist_ok=True)
        with indexed_writer(tmp_path / "index" / "train" / source, np.dtype("uint16"), 257) as writer:
            for text in texts:
                writer.add(np.array(tokenizer.encode(text)))
    return HeldOutCorpus(tmp_path / "curate", tmp_path / "index", seed=1)


def test_a_checkpoint_is_evaluated_from_folder_to_folder(tmp_path, corpus, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint("llama", sequence_length=700)
    for name in ("first", "second"):
        rows = evaluate_folder(
            CheckpointPaths(checkpoint, tokenizer_folder),
            EvaluationPaths(tmp_path / name, corpus=corpus),
            CONFIG,
            Reporter.silent(),
        )
    found = {(row.task, row.metric): row for row in rows}
    assert found["cloze", "acc"].count == 20 and found["cloze", "acc"].chance == 0.25
    whole = found["bits_per_byte (all sources)", "bits_per_byte"]
    tokenizer = load_tokenizer(tokenizer_folder)
    texts = [document(source, number) for source in ("code", "prose") for number in range(5)]
    counts = np.bincount([token for text in texts for token in tokenizer.encode(text)], minlength=257)
    assert whole.score > 8 and 3 < whole.chance < 5
    assert unigram_bits_per_byte(counts, tokenizer.encode(texts[0]), len(texts[0])) == pytest.approx(
        whole.chance, abs=0.3
    )
    files = {path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()}
    assert {str(path) for path in files} >= {"results.json", "table.md", "generations.json", "samples/cloze.jsonl"}
    for path in files:
        assert (tmp_path / "first" / path).read_bytes() == (tmp_path / "second" / path).read_bytes()
    generations = json.loads((tmp_path / "first" / "generations.json").read_text())
    assert [item["source"] for item in generations] == ["code", "prose"]
    assert document("code", 0).startswith(generations[0]["prompt"] + generations[0]["reference"])


def test_bits_per_byte_by_language_and_script(tmp_path, corpus, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint("llama", sequence_length=700)
    config = EvaluateConfig(tasks=("bits_per_byte",), group_by="language", num_continuations=0)
    rows = evaluate_folder(
        CheckpointPaths(checkpoint, tokenizer_folder),
        EvaluationPaths(tmp_path, corpus=corpus),
        config,
        Reporter.silent(),
    )
    found = {row.task: row for row in rows}
    names = [
        "bits_per_byte (all languages)",
        "bits_per_byte (script Latn)",
        "bits_per_byte de_Latn",
        "bits_per_byte en_Latn",
    ]
    assert list(found) == names
    assert [found[name].count for name in names] == [10, 10, 2, 8]
    sizes = {"de_Latn": 0, "en_Latn": 0}
    for source in ("code", "prose"):
        for number in range(5):
            sizes["en_Latn" if number else "de_Latn"] += len(document(source, number))
    bits = sum(found[f"bits_per_byte {name}"].score * size for name, size in sizes.items())
    assert found[names[0]].score == pytest.approx(bits / sum(sizes.values()))


def test_held_out_tasks_need_a_corpus(tmp_path, random_checkpoint, tokenizer_folder):
    with pytest.raises(RecipeError, match="bits_per_byte, cloze need the held-out documents"):
        evaluate_folder(
            CheckpointPaths(random_checkpoint(), tokenizer_folder),
            EvaluationPaths(tmp_path / "out"),
            CONFIG,
            Reporter.silent(),
        )


def test_a_corpus_without_held_out_documents_is_said(tmp_path, random_checkpoint, tokenizer_folder):
    empty = HeldOutCorpus(tmp_path / "none", tmp_path / "none", seed=1)
    with pytest.raises(InputError, match="no held-out document"):
        evaluate_folder(
            CheckpointPaths(random_checkpoint(), tokenizer_folder),
            EvaluationPaths(tmp_path / "out", corpus=empty),
            CONFIG,
            Reporter.silent(),
        )


def test_a_half_written_checkpoint_is_refused(tmp_path, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint()
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no manifest\.json"):
        evaluate_folder(
            CheckpointPaths(checkpoint, tokenizer_folder), EvaluationPaths(tmp_path / "out"), CONFIG, Reporter.silent()
        )


def test_recall_is_measured_by_length_without_a_corpus(tmp_path, random_checkpoint, tokenizer_folder):
    source = CheckpointPaths(random_checkpoint("llama", sequence_length=400), tokenizer_folder)
    config = EvaluateConfig(tasks=("needle", "phonebook"), recall_items=6, recall_choices=2, num_continuations=0)
    rows = evaluate_folder(source, EvaluationPaths(tmp_path / "results"), config, Reporter.silent())
    assert {row.task for row in rows} == {f"{name} {length} tokens" for name in config.tasks for length in (200, 400)}
    assert all(row.count == 6 and row.num_skipped == 0 for row in rows)
    assert {row.chance for row in rows if row.metric == "acc"} == {0.5}
