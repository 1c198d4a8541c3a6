"""The stages `tokenizer` and `index` on a few hundred documents: results, restarts after SIGKILL, workers."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gristmill.data_pipeline.corpus import splits
from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import Lock
from gristmill.foundation.manifest import StageIdentity, output_files, write_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages import index, tokenizer, train
from gristmill.pipelines.stages.stage import StageContext
from gristmill.pipelines.stages.train import open_data
from gristmill.pipelines.workdir.data_forms import open_format, sampling
from gristmill.tokenizers import index_corpus
from gristmill.tokenizers.tokenizer import load_tokenizer

SPLIT_OF = ("train",) * 8 + ("validation", "test")


def recipe_of(**changes) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "seed": 7,
            "sources": [
                {"name": "front", "format": "text", "paths": ["x"], "weight": 0.7},
                {"name": "back", "format": "text", "paths": ["y"], "weight": 0.3},
            ],
            "tokenizer": {"vocab_size": 800, "sample_bytes": 300_000},
            "model": {"layers": 1, "width": 16, "heads": 1, "kv_heads": 1, "sequence_length": 32},
            "train": {"tokens": 1000, "batch_tokens": 64},
            **changes,
        }
    )


@pytest.fixture(scope="session")
def corpus(small_corpus, tmp_path_factory) -> Path:
    """A `curate` folder: paragraphs of docstrings, of modules a to m (front) and n to z (back), in three splits."""
    folder = tmp_path_factory.mktemp("curate")
    for source, letters in (("front", "abcdefghijklm"), ("back", "nopqrstuvwxyz")):
        files = [path for path in sorted(small_corpus.glob("*.txt")) if path.name[0] in letters]
        texts = [text for path in files for text in path.read_text("utf-8").split("\n\n") if text]
        for split in ("train", "validation", "test"):
            chosen = [text for number, text in enumerate(texts) if SPLIT_OF[number % 10] == split]
            path = folder / "documents" / split / f"{source}-00000.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            paths = [json.dumps({"path": f"pages/{source}/{number}.md"}) for number in range(len(chosen))]
            columns = {
                "text": chosen,
                "metadata": paths,
                "doc_id": [f"{source}-{split}-{number}" for number in range(len(chosen))],
            }
            table = pa.table({**columns, "language": [["en", "de"][len(text) % 2] for text in chosen]})
            pq.write_table(table, path, row_group_size=1024)
    return folder


def context_of(folder: Path, inputs: dict[str, Path], workers: int = 1, recipe: Recipe | None = None) -> StageContext:
    folder.mkdir(parents=True, exist_ok=True)
    chosen = recipe or recipe_of()
    engine = LocalEngine(workers, Reporter.silent())
    return StageContext(chosen, folder, inputs, folder / "cache", Lock(sources=()), engine, engine.reporter)


def digests(folder: Path) -> dict[str, str]:
    files = output_files(folder)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="session")
def stages(corpus, tmp_path_factory) -> dict[str, Path]:
    """Both stages run once, undisturbed, by one worker."""
    base = tmp_path_factory.mktemp("stages")
    inputs = {"curate": corpus, "tokenizer": base / "tokenizer"}
    tokenizer.run(context_of(base / "tokenizer", inputs))
    index.run(context_of(base / "index", inputs))
    return {**inputs, "index": base / "index"}


def test_the_tokenizer_stage_gives_the_same_bytes_again(corpus, stages, tmp_path):
    metadata = tokenizer.run(context_of(tmp_path, {"curate": corpus}, workers=2))
    assert digests(tmp_path) == digests(stages["tokenizer"])
    assert metadata["vocab_size"] == 800
    texts = {
        name: pq.read_table(corpus / f"documents/train/{name}-00000.parquet")["text"].to_pylist()
        for name in ("front", "back")
    }
    sizes = {name: sum(len(text.encode()) for text in documents) for name, documents in texts.items()}
    sampled = metadata["trained_on_bytes"]
    assert sampled["front"] / sampled["back"] == pytest.approx(sizes["front"] / sizes["back"], rel=0.1)


def test_the_tokenizer_is_measured_by_language_and_fails_on_a_missed_goal(corpus, tmp_path):
    settings = {"vocab_size": 800, "sample_bytes": 300_000, "group_by": "language"}
    tokenizer.run(context_of(tmp_path, {"curate": corpus}, recipe=recipe_of(tokenizer=settings)))
    found = json.loads((tmp_path / "languages.json").read_bytes())
    assert [group["group"] for group in found["languages"]] == ["de", "en"]
    assert all(group["bytes_per_token"] > 1.5 and group["byte_fallback"] < 0.1 for group in found["languages"])
    assert sum(found["vocabulary"].values()) == 800 and found["vocabulary"]["single bytes"] == 256
    requirements = {"min_bytes_per_token": {"de": 99, "fr": 1}, "max_byte_fallback": 0.5}
    context = context_of(
        tmp_path / "requirements",
        {"curate": corpus},
        recipe=recipe_of(tokenizer={**settings, "requirements": requirements}),
    )
    missed = (
        r"misses 2 of tokenizer\.requirements: de: bytes_per_token .*, at least 99.0000; "
        "fr: no text to measure it on; raise"
    )
    with pytest.raises(InputError, match=missed):
        tokenizer.run(context)


def test_every_document_is_indexed_once_in_the_keyed_order(corpus, stages):
    encoder = load_tokenizer(stages["tokenizer"])
    for split in ("train", "validation", "test"):
        for source in ("front", "back"):
            texts = pq.read_table(corpus / "documents" / split / f"{source}-00000.parquet")["text"].to_pylist()
            reader = IndexedReader(stages["index"] / split / source)
            reader.check_ids(encoder.vocab_size)
            order = Permutation(len(texts), key_of(7, "documents", source, split)).whole()
            expected = [[*encoder.encode(texts[place]), encoder.end_of_document] for place in order]
            assert [document.tolist() for document in reader.documents()] == expected


def test_the_dataset_says_what_it_holds(corpus, stages):
    described = json.loads((stages["index"] / "dataset.json").read_text())
    texts = pq.read_table(corpus / "documents" / "train" / "front-00000.parquet")["text"].to_pylist()
    front = described["sources"][0]
    tokens = [source["splits"]["train"]["tokens"] for source in described["sources"]]
    assert (front["name"], front["weight"]) == ("front", tokens[0] / sum(tokens))
    assert front["splits"]["train"]["documents"] == len(texts)
    assert front["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert described["dtype"] == "uint16"


def test_the_weights_of_a_recipe_decide_when_samples_are_drawn(stages):
    sources = recipe_of().model_dump()["sources"]
    for weights in ((0.7, 0.3), (1, 4)):
        weighed = [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)]
        recipe = recipe_of(sources=weighed)
        assert index.config(recipe) == index.config(recipe_of()), "a new mixture rebuilds no index"
        assert tokenizer.config(recipe) == tokenizer.config(recipe_of())
        drawn = open_format("windows", stages["index"], "train", recipe).drawn(1024 * 10)
        assert sum(draw.samples for draw in drawn) == 10240
        assert abs(drawn[0].samples - 10240 * weights[0] / sum(weights)) < 2
    assert train.config(recipe) != train.config(recipe_of())


def test_the_seed_of_training_orders_training_samples_alone(stages):
    first, other = recipe_of(), recipe_of(train={"tokens": 1000, "batch_tokens": 64, "seed": 8})
    for stage in (index, tokenizer):
        assert stage.config(first) == stage.config(other)
    assert train.config(first) != train.config(other)
    for split, is_equal in (("train", False), ("validation", True), ("test", True)):
        samples = [open_format("windows", stages["index"], split, recipe) for recipe in (first, other)]
        batches = [opened.batch(range(8))["tokens"].tolist() for opened in samples]
        assert (batches[0] == batches[1]) is is_equal, split


def test_a_source_that_nothing_draws_from_is_refused():
    sources = recipe_of().model_dump()["sources"]
    sources[1]["weight"] = 0.0
    with pytest.raises(ValidationError, match="source 'back' has weight 0 and no phase draws from it"):
        recipe_of(sources=sources)
    recipe_of(sources=sources, index={"phases": [{"from_tokens": 0, "weights": {"front": 1, "back": 1}}]})


def test_every_language_of_a_source_is_a_source_of_its_own(corpus, stages, tmp_path, monkeypatch):
    """Odd texts are German in this corpus: the same documents in their keyed order, half of the samples each."""
    languages = {"languages": {"alpha": 0.01, "min_tokens": 100}}
    for name, slice_bytes in (("small", 20_000), ("large", 4_000_000)):
        monkeypatch.setattr(splits, "SLICE_BYTES", slice_bytes)
        monkeypatch.setattr(index_corpus, "TASK_BYTES", slice_bytes)
        index.run(context_of(tmp_path / name, stages, recipe=recipe_of(index=languages)))
    assert digests(tmp_path / "small") == digests(tmp_path / "large")
    encoder = load_tokenizer(stages["tokenizer"])
    dataset = read_dataset(tmp_path / "large")
    assert [source.name for source in dataset.sources] == ["front.de", "front.en", "back.de", "back.en"]
    for split in ("train", "validation", "test"):
        for name, source, odd in (("front.de", "front", 1), ("back.en", "back", 0)):
            table = pq.read_table(corpus / "documents" / split / f"{source}-00000.parquet")
            texts = [text for text in table["text"].to_pylist() if len(text) % 2 == odd]
            order = Permutation(len(texts), key_of(7, "documents", name, split)).whole()
            expected = [[*encoder.encode(texts[place]), encoder.end_of_document] for place in order]
            reader = IndexedReader(tmp_path / "large" / split / name)
            assert [document.tolist() for document in reader.documents()] == expected
            counts = next(each for each in dataset.sources if each.name == name).splits[split]
            assert counts.bytes == sum(len(text.encode()) for text in texts)
    shares = sampling(recipe_of(index=languages), dataset).phases[0].weights
    assert shares["front.de"] + shares["back.de"] == pytest.approx(0.5, abs=0.01)
    assert shares["front.en"] + shares["front.de"] == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("languages", [None, {"min_tokens": 100}])
def test_documents_are_repeated_by_the_number_of_their_duplicates(corpus, stages, tmp_path, languages):
    """Three documents are in the ledger as what one, four and ten others duplicate."""
    curate = tmp_path / "curate"
    shutil.copytree(corpus / "documents", curate / "documents")
    kept = ["front-train-3"] + ["front-train-5"] * 4 + ["front-train-8"] * 10 + ["front-test-1"] * 4 + [None] * 7
    (curate / "ledger").mkdir()
    pq.write_table(pa.table({"duplicate_of": pa.array(kept, pa.string())}), curate / "ledger" / "front-00000.parquet")
    recipe = recipe_of(index={"rehydrate": {2: 2, 5: 3, 11: 1}, "languages": languages})
    index.run(context_of(tmp_path / "index", {**stages, "curate": curate}, recipe=recipe))
    encoder = load_tokenizer(stages["tokenizer"])
    texts = pq.read_table(corpus / "documents/train/front-00000.parquet")["text"].to_pylist()
    times = [{3: 2, 5: 3}.get(number, 1) for number in range(len(texts))]
    expected = sorted(encoder.encode(text) for text, count in zip(texts, times, strict=True) for _ in range(count))
    readers = [IndexedReader(path.with_suffix("")) for path in (tmp_path / "index/train").glob("front*.idx")]
    assert sorted(document.tolist()[:-1] for reader in readers for document in reader.documents()) == expected
    counts = [source for source in read_dataset(tmp_path / "index").sources if source.name.startswith("front")]
    whole = sum(len(text.encode()) * count for text, count in zip(texts, times, strict=True))
    assert sum(source.splits["train"].bytes for source in counts) == whole
    held_out = [digests(folder / "index" / "test") for folder in (tmp_path, stages["index"].parent)]
    assert languages or held_out[0] == held_out[1]


def test_languages_with_little_text_are_one_source_together(stages, tmp_path):
    recipe = recipe_of(index={"languages": {"min_tokens": 10**9}})
    index.run(context_of(tmp_path, stages, recipe=recipe))
    assert [source.name for source in read_dataset(tmp_path).sources] == ["front.other", "back.other"]
    for source in ("front", "back"):
        assert len(IndexedReader(tmp_path / "train" / f"{source}.other")) == len(
            IndexedReader(stages["index"] / "train" / source)
        )


@pytest.mark.parametrize("languages", [None, {"min_tokens": 100}])
def test_a_held_out_source_is_indexed_and_not_trained_on(corpus, stages, tmp_path, languages):
    curate = tmp_path / "curate"
    shutil.copytree(corpus / "documents", curate / "documents")
    for path in curate.glob("documents/*/back-*"):
        if path.parent.name != "test":
            path.unlink()
    sources = [
        {"name": "front", "format": "text", "paths": ["x"], "weight": 2.0},
        {"name": "back", "format": "text", "paths": ["y"], "held_out": "test"},
    ]
    recipe = recipe_of(sources=sources, index={"languages": languages})
    inputs = {"curate": curate, "tokenizer": tmp_path / "tokenizer"}
    tokenizer.run(context_of(tmp_path / "tokenizer", inputs, recipe=recipe))
    index.run(context_of(tmp_path / "index", inputs, recipe=recipe))
    for described in read_dataset(tmp_path / "index").sources:
        trained, scored = (described.splits[split].tokens for split in ("train", "test"))
        assert scored > 0
        assert (described.weight > 0, trained > 0) == (described.name.startswith("front"),) * 2
    for split in ("train", "validation"):
        samples = open_format("windows", tmp_path / "index", split, recipe)
        assert all(name.startswith("front") for name in samples.sources)


def test_sources_without_weights_are_drawn_by_tokens_and_repeats_are_reported(stages, tmp_path):
    sources = [{"name": name, "format": "text", "paths": ["x"]} for name in ("front", "back")]
    context = context_of(
        tmp_path, stages, recipe=recipe_of(sources=sources, train={"tokens": 9_000_000, "batch_tokens": 64})
    )
    index.run(context)
    described = read_dataset(tmp_path).sources
    tokens = [source.splits["train"].tokens for source in described]
    assert [source.weight for source in described] == [count / sum(tokens) for count in tokens]
    (front, _) = index.recipe_repeat_warnings(context.recipe, read_dataset(tmp_path))
    assert f"source 'front' has {tokens[0]:,} tokens and is seen {9e6 / sum(tokens):.1f} times" in front
    assert index.recipe_repeat_warnings(recipe_of(), read_dataset(tmp_path)) == []


def test_training_rejects_an_index_altered_in_place(stages, tmp_path):
    folder = tmp_path / "index"
    shutil.copytree(stages["index"], folder)
    write_manifest(folder, StageIdentity("index", 1), {}, {})
    context = context_of(tmp_path / "train", {"index": folder})
    assert open_data(context).held_out is not None
    for name in ("train/front.bin", "train/back.idx", "validation/front.bin"):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(bytes(content))
        with pytest.raises(InputError, match=rf"{name}.* again"):
            open_data(context)
        content[-1] ^= 1
        (folder / name).write_bytes(bytes(content))


def test_output_does_not_depend_on_workers_or_task_size(stages, tmp_path, monkeypatch):
    monkeypatch.setattr(index_corpus, "MIN_PARALLEL_SECONDS", 0.0)
    index.run(context_of(tmp_path / "two", stages, workers=2))
    monkeypatch.setattr(splits, "SLICE_BYTES", 20_000)
    monkeypatch.setattr(index_corpus, "TASK_BYTES", 20_000)
    index.run(context_of(tmp_path / "slices", stages))
    assert digests(tmp_path / "two") == digests(tmp_path / "slices") == digests(stages["index"])


KILLED = """
import sys, time
from pathlib import Path
from gristmill.data_pipeline.corpus import splits
from gristmill.data_pipeline.indexed import dataset
from gristmill.tokenizers import index_corpus
splits.SLICE_BYTES = index_corpus.TASK_BYTES = 20_000
import test_tokenizer_index as ours
from gristmill.pipelines.stages import index
from gristmill.tokenizers import index_corpus
slow = index_corpus.encode_documents
def slower(task):
    time.sleep(0.02)
    slow(task)
index_corpus.encode_documents = slower
index.run(ours.context_of(Path(sys.argv[1]), {"curate": Path(sys.argv[2]), "tokenizer": Path(sys.argv[3])}))
"""


def test_a_rerun_after_sigkill_writes_the_same_bytes(stages, tmp_path, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "index"), str(stages["curate"]), str(stages["tokenizer"])]
    for files_before_the_kill in (3, 12):
        process = subprocess.Popen(arguments, env=environment)
        while len(list((tmp_path / "index").rglob("*.idx"))) < files_before_the_kill and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "index" / "dataset.json").exists()
    monkeypatch.setattr(splits, "SLICE_BYTES", 20_000)
    monkeypatch.setattr("gristmill.tokenizers.index_corpus.TASK_BYTES", 20_000)
    index.run(context_of(tmp_path / "index", stages))
    assert digests(tmp_path / "index") == digests(stages["index"])


def test_parts_that_were_cut_at_other_rows_are_not_reused(stages, tmp_path, monkeypatch):
    """A run of a version with smaller tasks was stopped before it merged them."""
    monkeypatch.setattr(splits, "SLICE_BYTES", 20_000)
    with monkeypatch.context() as small:
        small.setattr(index_corpus, "TASK_BYTES", 20_000)
        small.setattr(index_corpus, "_merge", _stop)
        with pytest.raises(KeyboardInterrupt):
            index.run(context_of(tmp_path / "index", stages))
    assert len(list((tmp_path / "index").rglob("*.idx"))) > 10
    index.run(context_of(tmp_path / "index", stages))
    assert digests(tmp_path / "index") == digests(stages["index"])


def _stop(task):
    raise KeyboardInterrupt


def test_the_message_for_a_too_large_vocabulary_names_the_largest_possible_one(corpus, tmp_path):
    recipe = recipe_of(tokenizer={"vocab_size": 500_000, "sample_bytes": 50_000})
    with pytest.raises(InputError, match=r"set tokenizer\.vocab_size to \d+ or less"):
        tokenizer.run(context_of(tmp_path, {"curate": corpus}, recipe=recipe))


def test_a_source_without_documents_is_named(stages, tmp_path):
    recipe = recipe_of(sources=[{"name": "gone", "format": "text", "paths": ["x"]}])
    with pytest.raises(InputError, match="source 'gone' has no documents in the train split"):
        tokenizer.run(context_of(tmp_path / "t", stages, recipe=recipe))
    with pytest.raises(InputError, match="source 'gone' has no documents in the train split"):
        index.run(context_of(tmp_path / "i", stages, recipe=recipe))


def test_a_damaged_document_file_is_named(stages, tmp_path):
    path = tmp_path / "documents" / "train" / "front-00000.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes((stages["curate"] / "documents/train/front-00000.parquet").read_bytes()[:-100])
    with pytest.raises(InputError, match=r"front-00000\.parquet: not a readable Parquet file"):
        index.run(context_of(tmp_path / "i", {**stages, "curate": tmp_path}))
    pq.write_table(pa.table({"words": ["a"]}), path)
    with pytest.raises(InputError, match=r"no column 'text', it has \['words'\]"):
        index.run(context_of(tmp_path / "i", {**stages, "curate": tmp_path}))


def test_sampling_settings_do_not_rebuild_the_index():
    assert index.config(recipe_of()) == index.config(recipe_of(index={"packing": "best_fit", "fim_rate": 0.5}))
    assert index.config(recipe_of()) != index.config(recipe_of(seed=8))
