"""Rows of the corpus behind the documents of a .bin, with sampling by language and repeated documents."""

import json
from collections import Counter
from pathlib import Path

import pytest

from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.pipelines.provenance.trace import Tracer
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.tokenizers.tokenizer import load_tokenizer

GERMAN = "Der Müller mahlt im Dorf sein Korn, und der Sack Nummer {} ist nun voll."
ENGLISH = "The miller of the village grinds the corn, and sack number {} is full now."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[dict, Path]:
    """80 documents in two languages, of which some were copied."""
    folder = tmp_path_factory.mktemp("order")
    texts = [(GERMAN if number % 3 == 0 else ENGLISH).format(number) for number in range(80)]
    records = [{"text": text, "language": "de" if text.startswith("Der") else "en"} for text in texts]
    records += records[:6] + records[:2] * 3  # clusters of 5 and of 2
    (folder / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    recipe = {
        "name": "ordered",
        "seed": 3,
        "sources": [{"name": "s", "format": "jsonl", "paths": [str(folder / "a.jsonl")]}],
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.0}},
        "tokenizer": {"vocab_size": 320},
        "model": {"layers": 1, "width": 32, "heads": 2, "sequence_length": 32},
        "train": {"tokens": 6400, "batch_tokens": 64, "precision": "fp32"},
    }
    return recipe, folder


@pytest.mark.parametrize(
    "index",
    [
        {"languages": {"min_tokens": 10}},
        {"rehydrate": {2: 2, 5: 3}},
        {"languages": {"min_tokens": 10}, "rehydrate": {2: 2, 5: 3}, "packing": "best_fit"},
        {"languages": {"min_tokens": 10**6}},
        {"mix": {"score": "num_chars", "buckets": 3, "power": 0, "max_epochs": 100}},
    ],
)
def test_the_documents_of_every_sample_are_those_of_its_tokens(corpus, index):
    recipe, folder = corpus
    recipe = recipe | {"index": index}
    workdir = run_recipe(recipe, folder / "work", "index")
    tracer = Tracer(validate(recipe, "recipe"), workdir)
    tokenizer = load_tokenizer(workdir / "tokenizer")
    read_by: dict[str, set[int]] = {}
    for k in range(tracer.num_samples):
        sample = tracer.samples.sample(k)
        tokens = [*sample["tokens"].tolist(), int(sample["targets"][-1])]
        read = []
        for span in tracer.documents_of(range(k, k + 1)):
            read += [*tokenizer.encode(tracer.text_of(span)), tokenizer.end_of_document][span.start : span.stop]
            read_by.setdefault(span.doc_id, set()).add(k)
        assert tokens[: len(read)] == read and set(tokens[len(read) :]) <= {tokenizer.end_of_document}
    assert len(read_by) == 80
    for doc_id, numbers in read_by.items():
        assert {k for _, k, _ in tracer.samples_of(doc_id)} == numbers
        assert tracer.first_sample(*tracer._find(doc_id)) == min(numbers)
    sizes = Counter(len(order.documents(row)) for order in tracer.orders.values() for row in range(80))
    repeated = {2: 4, 3: 2} if "rehydrate" in index else {}
    assert {times: count for times, count in sizes.items() if times > 1} == repeated


def test_the_pieces_of_sentence_pairs_are_those_of_documents(corpus):
    recipe, folder = corpus
    recipe = recipe | {"index": {"sentences": True}, "train": recipe["train"] | {"objective": "masked"}}
    (folder / "pairs.jsonl").write_text(
        "\n".join(json.dumps({"text": f"Sack {n} is full. The miller ties it. Cart {n} comes."}) for n in range(40))
    )
    recipe["sources"] = [{"name": "s", "format": "jsonl", "paths": [str(folder / "pairs.jsonl")]}]
    workdir = run_recipe(recipe, folder / "pairs", "index")
    tracer, tokenizer = Tracer(validate(recipe, "recipe"), workdir), load_tokenizer(workdir / "tokenizer")
    indexed = list(IndexedReader(workdir / "index" / "train" / "s").documents())
    for k in range(60):
        pair = tracer.samples.pair(k)
        spans = tracer.documents_of(range(k, k + 1))
        [place] = tracer.orders["s"].documents(spans[0].row)
        text = tokenizer.decode(indexed[place].tolist()[:-1])
        assert "".join(text.split()) == "".join(tracer.text_of(spans[0]).split())  # sentences are encoded apart
        tokens = [indexed[place][span.start : span.stop].tolist() for span in spans]
        assert [pair.first.tolist(), pair.second.tolist()] == (tokens[::-1] if pair.swapped else tokens)
        assert k in {number for _, number, _ in tracer.samples_of(spans[0].doc_id)}
