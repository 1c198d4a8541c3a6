"""Sample k against a naive implementation, the laws of an epoch, and what is refused."""

import hashlib
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig, PhaseConfig
from gristmill.data_pipeline.indexed.dataset import DATASET_NAME
from gristmill.data_pipeline.indexed.draws import Blend, Permutation, key_of
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.foundation.errors import InputError, RecipeError

END = 1


@pytest.fixture
def two_sources(make_dataset, random_documents):
    """books: 0.75 of the draws; notes: 0.25. Ids of books are even, those of notes odd, but for END."""
    books = [[token * 2 % 900 + 10 for token in document] for document in random_documents(1, 60, 30)]
    notes = [[token * 2 % 900 + 11 for token in document] for document in random_documents(2, 30, 20)]
    return make_dataset({"books": (0.75, books), "notes": (0.25, notes)}), {"books": books, "notes": notes}


def naive(documents: dict, weights: list[float], sequence_length: int, seed: int, block: int, num_samples: int):
    """All samples in order, from whole lists: streams, windows, shuffled epochs, and the blend slot by slot."""
    names = list(documents)
    blend = Blend(weights, block, key_of(key_of(seed, "blend"), 0))
    queues = {name: [] for name in names}
    epochs = Counter()
    for slot in range(num_samples):
        name = names[blend.locate(slot)[0]]
        if not queues[name]:
            stream = [token for document in documents[name] for token in [*document, END]]
            windows = [
                stream[at : at + sequence_length + 1] for at in range(0, len(stream) - sequence_length, sequence_length)
            ]
            order = Permutation(len(windows), key_of(seed, "epoch", name, epochs[name])).whole()
            queues[name] = [windows[place] for place in order]
            epochs[name] += 1
        yield name, queues[name].pop(0)


def test_sample_k_is_what_a_naive_implementation_computes(two_sources):
    folder, documents = two_sources
    samples = open_samples(folder, "train", 16, seed=7, config=IndexConfig(block_samples=8))
    for k, (name, window) in enumerate(naive(documents, [0.75, 0.25], 16, 7, 8, 400)):
        sample = samples.sample(k)
        assert samples.source_of(k) == name
        assert sample["tokens"].tolist() == window[:-1]
        assert sample["targets"].tolist() == window[1:]


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order(two_sources):
    folder, documents = two_sources
    samples = open_samples(folder, "train", 16, seed=7, config=IndexConfig(block_samples=4))
    drawn = {"books": [], "notes": []}
    for k in range(400):
        drawn[samples.source_of(k)].append(tuple(samples.sample(k)["targets"].tolist()))
    for name, seen in drawn.items():
        size = samples.samples_of(name)
        stream = [token for document in documents[name] for token in [*document, END]]
        every_target = Counter(stream[1 : 1 + size * 16])
        first, second = seen[:size], seen[size : 2 * size]
        assert len(second) == size
        assert Counter(token for window in first for token in window) == every_target
        assert sorted(first) == sorted(second)
        assert first != second


def test_no_sample_crosses_sources(two_sources):
    folder, _ = two_sources
    for packing in ("concat", "best_fit"):
        samples = open_samples(folder, "train", 16, seed=7, config=IndexConfig(packing=packing))
        for k in range(200):
            ids = samples.sample(k)["tokens"]
            assert set(ids[ids != END] % 2) <= {0 if samples.source_of(k) == "books" else 1}


def test_any_way_of_dealing_draws_the_same_stream(two_sources):
    """The tokens of every step are the same for any number of ranks, growing batches, and after a restart at any k."""
    folder, _ = two_sources

    def opened():
        return open_samples(folder, "train", 16, seed=7, config=IndexConfig(block_samples=8))

    def digest(numbers) -> str:
        samples = opened()
        return hashlib.sha256(b"".join(samples.sample(k)["tokens"].tobytes() for k in numbers)).hexdigest()

    steps = [range(0, 4), range(4, 12), range(12, 28), range(28, 60)]  # the batch doubles
    whole = digest(range(60))
    assert digest(k for step in steps for k in step) == whole
    for ranks in (2, 4):
        parts = {rank: opened() for rank in range(ranks)}
        dealt = [parts[at * ranks // len(step)].sample(k)["tokens"] for step in steps for at, k in enumerate(step)]
        assert hashlib.sha256(b"".join(part.tobytes() for part in dealt)).hexdigest() == whole
    assert (
        digest(range(37, 60))
        == hashlib.sha256(b"".join(opened().sample(k)["tokens"].tobytes() for k in range(37, 60))).hexdigest()
    )


def test_seeds_and_settings_tell_streams_apart(two_sources):
    folder, _ = two_sources
    first = open_samples(folder, "train", 16, seed=7, config=IndexConfig())
    again = open_samples(folder, "train", 16, seed=7, config=IndexConfig())
    other = open_samples(folder, "train", 16, seed=8, config=IndexConfig())
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert any((first.sample(k)["tokens"] != other.sample(k)["tokens"]).any() for k in range(5))


def test_masks_worked_by_hand(make_dataset):
    folder = make_dataset({"books": (1.0, [[10, 11], [20], [30, 31, 32]])})
    samples = open_samples(folder, "train", 8, seed=0, config=IndexConfig(mask_documents=True))
    sample = samples.sample(0)
    assert sample["tokens"].tolist() == [10, 11, 1, 20, 1, 30, 31, 32]
    assert sample["document_bounds"].tolist() == [0, 3, 5, 8]
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert sample["weights"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]  # not the next document's first token
    plain = open_samples(folder, "train", 8, seed=0, config=IndexConfig()).sample(0)
    assert plain["document_bounds"].tolist() == [0, 8]
    assert plain["positions"].tolist() == list(range(8))
    assert plain["weights"].tolist() == [1] * 8
    types = {name: str(values.dtype) for name, values in sample.items()}
    assert types == {
        "tokens": "int64",
        "targets": "int64",
        "weights": "float32",
        "positions": "int64",
        "document_bounds": "int32",
    }


PHASES = (
    PhaseConfig(from_tokens=0, weights={"books": 1.0}),
    PhaseConfig(from_tokens=16 * 20, weights={"books": 0.5, "notes": 0.5}),
)


@pytest.mark.parametrize("mask_documents", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"packing": "best_fit"}, {"phases": PHASES}, {"fim_rate": 0.5}],
    ids=lambda settings: str([*settings]),
)
def test_a_batch_is_its_samples(make_dataset, two_sources, settings, mask_documents):
    folder = (
        make_dataset({"books": (1.0, two_sources[1]["books"])}, fim=True) if "fim_rate" in settings else two_sources[0]
    )
    config = IndexConfig(block_samples=8, mask_documents=mask_documents, **settings)
    samples = open_samples(folder, "train", 16, seed=7, config=config)
    for numbers in (range(0, 1), range(3, 70), [500, 2, 2, 10**9]):
        batch, drawn = samples.batch(numbers), [samples.sample(k) for k in numbers]
        for name in ("tokens", "targets", "weights", "positions"):
            assert batch[name].dtype == drawn[0][name].dtype
            assert batch[name].tolist() == [sample[name].tolist() for sample in drawn]
        for documents, sample in zip(batch["documents"], drawn, strict=True):
            assert (
                documents.tolist()
                == np.repeat(np.arange(len(sample["document_bounds"]) - 1), np.diff(sample["document_bounds"])).tolist()
            )


def test_padding_teaches_nothing(make_dataset):
    folder = make_dataset({"books": (1.0, [[10, 11, 12]])})
    sample = open_samples(folder, "train", 8, 0, IndexConfig(packing="best_fit", mask_documents=True)).sample(0)
    assert sample["tokens"].tolist() == [10, 11, 12, 1, 1, 1, 1, 1]
    assert sample["weights"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert sample["document_bounds"].tolist() == [0, 4, 8]


def test_phases_change_the_weights_at_their_tokens(two_sources):
    folder, _ = two_sources
    config = IndexConfig(
        block_samples=4,
        phases=(
            PhaseConfig(from_tokens=0, weights={"books": 1.0}),
            PhaseConfig(from_tokens=16 * 20, weights={"books": 0.5, "notes": 0.5}),
            PhaseConfig(from_tokens=16 * 39 + 1, weights={"notes": 1.0}),
        ),
    )
    samples = open_samples(folder, "train", 16, seed=7, config=config)
    sources = [samples.source_of(k) for k in range(60)]
    assert set(sources[:20]) == {"books"}
    assert Counter(sources[20:40]) == {"books": 10, "notes": 10}
    assert set(sources[40:]) == {"notes"}


def test_epochs_are_counted_and_capped(two_sources):
    folder, _ = two_sources
    samples = open_samples(folder, "train", 16, 7, IndexConfig(max_epochs={"notes": 2.0}))
    draws = {draw.source: draw for draw in samples.drawn(1024)}  # one block
    assert (draws["books"].samples, draws["notes"].samples) == (768, 256)
    assert draws["notes"].epochs == 256 / samples.samples_of("notes")
    assert draws["notes"].tokens == 256 * 16
    with pytest.raises(InputError, match=r"source 'notes' would be seen .* its cap is 2.0; train on fewer tokens"):
        samples.check_budget(1000)
    samples.check_budget(7 * samples.samples_of("notes"))
    with pytest.raises(InputError, match="source 'notes'"):
        for k in range(1000):
            samples.sample(k)


def test_too_little_data_is_said_with_the_mend(make_dataset):
    folder = make_dataset({"books": (1.0, [[10, 11]])})
    with pytest.raises(
        InputError, match=r"books: 3 tokens, a sample of sequence length 8 needs 9; set model.sequence_length to 2"
    ):
        open_samples(folder, "train", 8, 0, IndexConfig())
    with pytest.raises(InputError, match="0 tokens"):
        open_samples(folder, "validation", 8, 0, IndexConfig())


def test_a_source_too_short_to_train_on_is_said_and_a_held_out_one_is_not(make_dataset):
    sources = {"books": (0.5, [[10] * 20]), "notes": (0.5, [[11]])}
    for split, expected in (("train", ["NOT TRAINED ON"]), ("validation", [])):
        said = []
        open_samples(make_dataset(sources, split=split), split, 8, 0, IndexConfig(), said.append)
        assert [line.partition(":")[0] for line in said if "notes" in line] == expected


def test_held_out_sources_without_a_whole_sample_are_left_out_by_name(make_dataset):
    sources = {"books": (0.5, [[10] * 20]), "notes": (0.5, [[11]])}
    samples = open_samples(make_dataset(sources, split="validation"), "validation", 8, 0, IndexConfig())
    assert samples.left_out == ("notes",)
    assert {samples.source_of(k) for k in range(20)} == {"books"}


def test_what_does_not_belong_together_is_refused(make_dataset):
    sources = {"books": (0.5, [[10] * 20]), "notes": (0.5, [[11] * 20])}
    folder = make_dataset(sources, tokenizers={"notes": "another"})
    with pytest.raises(InputError, match=r"\['books', 'notes'\] were made with different tokenizers"):
        open_samples(folder, "train", 8, 0, IndexConfig())


@pytest.mark.parametrize("weight", [0.0, -0.5])
def test_a_weight_that_is_none_is_refused(make_dataset, weight):
    folder = make_dataset({"books": (0.5, [[10] * 20]), "notes": (weight, [[11] * 20])})
    with pytest.raises(InputError, match=rf"dataset\.json: source 'notes' has weight {weight:g}"):
        open_samples(folder, "train", 8, 0, IndexConfig())


def test_a_source_of_weight_zero_may_come_in_by_a_phase(make_dataset):
    folder = make_dataset({"books": (0.5, [[10] * 20]), "notes": (0.0, [[11] * 20])})
    phases = (PhaseConfig(from_tokens=0, weights={"books": 1.0}), PhaseConfig(from_tokens=80, weights={"notes": 1.0}))
    samples = open_samples(folder, "train", 8, 0, IndexConfig(phases=phases))
    assert [samples.source_of(k) for k in (9, 10)] == ["books", "notes"]


def test_held_out_text_is_measured_as_it_stands(make_dataset, random_documents):
    folder = make_dataset({"books": (1.0, random_documents(0, 20, 20))}, split="validation", fim=True)
    plain = open_samples(folder, "validation", 8, 0, IndexConfig())
    samples = open_samples(folder, "validation", 8, 0, IndexConfig(fim_rate=1.0, max_epochs=0.5))
    for k in range(2 * samples.samples_of("books")):
        assert np.array_equal(samples.sample(k)["tokens"], plain.sample(k)["tokens"])


def test_the_budget_is_one_line(two_sources):
    samples = open_samples(two_sources[0], "train", 16, 7, IndexConfig())
    assert samples.budget(1024).startswith("books 75.0% (12,288 tokens, ")


def test_a_weight_of_nan_or_infinity_is_refused(make_dataset):
    folder = make_dataset({"books": (0.5, [[10] * 20])})
    path = folder / DATASET_NAME
    for value in ("NaN", "Infinity"):
        path.write_text(path.read_text().replace('"weight":0.5', f'"weight":{value}'))
        with pytest.raises(InputError, match=r"dataset\.json"):
            open_samples(folder, "train", 8, 0, IndexConfig())
        path.write_text(path.read_text().replace(f'"weight":{value}', '"weight":0.5'))


def test_phases_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"weights\.a"):
        PhaseConfig(from_tokens=0, weights={"a": float("nan")})
    with pytest.raises(ValueError, match="weight of source 'a' is -1"):
        PhaseConfig(from_tokens=0, weights={"a": -1.0})
    with pytest.raises(ValueError, match=r"phases start at \[5\]"):
        IndexConfig(phases=(PhaseConfig(from_tokens=5, weights={"a": 1.0}),))
    with pytest.raises(ValueError, match="a cap is a number above 0"):
        IndexConfig(max_epochs=0.0)


def test_settings_that_do_not_fit_the_dataset_are_refused(two_sources):
    folder, _ = two_sources
    unknown = IndexConfig(phases=(PhaseConfig(from_tokens=0, weights={"boks": 1.0}),))
    with pytest.raises(RecipeError, match=r"names \['boks'\], the dataset holds \['books', 'notes'\]"):
        open_samples(folder, "train", 16, 7, unknown)
    with pytest.raises(RecipeError, match=r"set tokenizer\.fim"):
        open_samples(folder, "train", 16, 7, IndexConfig(fim_rate=0.5))


def test_files_other_than_described_are_refused(two_sources):
    folder, _ = two_sources
    described = json.loads((folder / DATASET_NAME).read_text())
    described["sources"][0]["splits"]["train"]["tokens"] += 1
    (folder / DATASET_NAME).write_text(json.dumps(described))
    with pytest.raises(InputError, match=r"books: 60 documents, \d+ tokens of uint16, dataset.json says 60, "):
        open_samples(folder, "train", 16, 7, IndexConfig())
    with pytest.raises(InputError, match="run `gristmill index` first"):
        open_samples(folder / "train", "train", 16, 7, IndexConfig())


# Fill-in-the-middle: the pieces put back in order are the document, and each sample decides for itself.

PREFIX, MIDDLE, SUFFIX = 2, 3, 4


def put_back(ids: list[int]) -> list[int]:
    """The document that was rearranged: "<P> a <S> c <M> b" or "<P> <S> c <M> a b" -> a b c."""
    if PREFIX not in ids:
        return ids
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    before, after, rest = ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]
    return before + rest + after if before else rest + after


@pytest.mark.parametrize("suffix_first", [0.0, 1.0])
def test_documents_put_back_in_order_are_the_documents(make_dataset, random_documents, suffix_first):
    documents = random_documents(0, 40, 12)
    folder = make_dataset({"code": (1.0, documents)}, fim=True)
    config = IndexConfig(packing="best_fit", fim_rate=1.0, fim_suffix_first=suffix_first, mask_documents=True)
    samples = open_samples(folder, "train", 63, 5, config)
    seen = 0
    for k in range(samples.samples_of("code")):
        sample = samples.sample(k)
        bounds = sample["document_bounds"].tolist()
        for start, end in itertools.pairwise(bounds[:-1]):  # the last may have lost its end
            ids = sample["tokens"][start:end].tolist()
            if ids[-1] == 1 and len(ids) > 1 and ids[0] != 1:
                assert put_back(ids[:-1]) in documents
                seen += PREFIX in ids
    assert seen > 20


def test_the_rate_and_the_sources_decide(make_dataset, random_documents):
    sources = {"code": (0.5, random_documents(0, 200, 12)), "prose": (0.5, random_documents(1, 200, 12))}
    folder = make_dataset(sources, fim=True)
    config = IndexConfig(fim_rate=0.3, fim_sources=("code",), mask_documents=True)
    samples = open_samples(folder, "train", 64, 5, config)
    marks = {"code": 0, "prose": 0}
    documents = {"code": 0, "prose": 0}
    for k in range(200):
        sample = samples.sample(k)
        marks[samples.source_of(k)] += int((sample["tokens"] == PREFIX).sum())
        documents[samples.source_of(k)] += len(sample["document_bounds"]) - 1
    assert marks["prose"] == 0
    assert 0.2 < marks["code"] / documents["code"] < 0.4


def test_the_same_sample_every_time_and_the_shape_stays(make_dataset, random_documents):
    folder = make_dataset({"code": (1.0, random_documents(0, 100, 12))}, fim=True)
    config = IndexConfig(fim_rate=0.5, mask_documents=True)
    first, second = (open_samples(folder, "train", 32, 5, config) for _ in range(2))
    for k in range(100):
        sample, again = first.sample(k), second.sample(k)
        assert all(np.array_equal(sample[name], again[name]) for name in sample)
        assert sample["tokens"].shape == sample["targets"].shape == sample["positions"].shape == (32,)
        assert sample["document_bounds"][0] == 0
        assert sample["document_bounds"][-1] == 32
        assert (np.diff(sample["document_bounds"]) > 0).all()


# From samples to documents and back, against the tokens themselves.

PHASES = [
    PhaseConfig(from_tokens=0, weights={"books": 1}),
    PhaseConfig(from_tokens=8 * 33, weights={"books": 1, "notes": 3}),
]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("phases", [[], PHASES])
@pytest.mark.parametrize("sequence_length", [8, 21])
@pytest.mark.parametrize("seed", [0, 5])
def test_the_documents_of_a_sample_are_its_tokens_and_its_samples_those_that_hold_it(
    two_sources, packing, phases, sequence_length, seed
):
    folder, documents = two_sources
    config = IndexConfig(packing=packing, phases=phases, block_samples=16, mask_documents=packing == "best_fit")
    samples = open_samples(folder, "train", sequence_length, seed, config)
    num_samples = 400  # several epochs of both sources
    read_by: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for k in range(num_samples):
        source, epoch, pieces = samples.pieces_of(k)
        assert source == samples.source_of(k)
        sample = samples.sample(k)
        tokens = [*sample["tokens"].tolist(), int(sample["targets"][-1])]
        ended = [[*document, END] for document in documents[source]]
        read = [token for piece in pieces for token in ended[piece.document][piece.start : piece.stop]]
        assert tokens[: len(read)] == read and set(tokens[len(read) :]) <= {END}
        for piece in pieces:
            read_by.setdefault((source, piece.document), set()).add((k, epoch))
    for (source, document), expected in read_by.items():
        assert samples.samples_with(source, document, num_samples) == sorted(expected)


@pytest.mark.parametrize("size", [1, 2, 5, 97, 100])
def test_a_permutation_has_its_inverse(size):
    order = Permutation(size, key_of("inverse", size))
    assert [order.inverse(order(index)) for index in range(size)] == list(range(size))
    with pytest.raises(IndexError):
        order.inverse(size)
