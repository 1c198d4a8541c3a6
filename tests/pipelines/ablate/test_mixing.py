"""A swarm from end to end with models of a few thousand parameters, and what is refused before it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.mix import cell_of, mix_repeats
from gristmill.evaluation.results import ablation
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate import corpora, experiment, mixing, runs
from gristmill.pipelines.ablate.corpora import Arm
from gristmill.pipelines.ablate.experiment import Plan, prepared, with_sources
from gristmill.pipelines.ablate.mixing import MixPlan, mix
from gristmill.pipelines.ablate.runs import ProxySize
from gristmill.pipelines.cli.ablate import parse_floors
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.data_forms import sampling

HERE = LocalEngine(1, Reporter.silent())
WORDS = ["".join(np.random.default_rng(number).choice(list("abcdefghijklmnopqrstuvwxyz"), 6)) for number in range(80)]


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Fifty refits take most of the time of a swarm of four models."""
    monkeypatch.setattr(ablation, "resampled_laws", partial(ablation.resampled_laws, resamples=5))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, str]:
    """(a corpus of words and of digits, its recipe)."""
    folder = tmp_path_factory.mktemp("mix")
    rng = np.random.default_rng(1)
    for name, alphabet in (("words", WORDS), ("digits", list("0123456789"))):
        lines = [json.dumps({"text": f"{number} " + " ".join(rng.choice(alphabet, 60))}) for number in range(200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        {"name": name, "format": "jsonl", "paths": [str(folder / f"{name}.jsonl")]} for name in ("words", "digits")
    ]
    recipe = {
        "name": "mix",
        "sources": sources,
        "curate": {"filters": [], "near_dedup": None, "splits": {"validation": 0.0, "test": 0.3}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return run_recipe(recipe, folder / "work", "curate") / "curate", str(folder / "recipe.yaml")


def plan(folder: Path, **changes) -> MixPlan:
    fields = {"runs": 4, "seconds": None, "flops": 1e12, "target_tokens": 1000, "max_epochs": 4.0, "floors": {}}
    return MixPlan(folder, **(fields | changes))


def test_from_a_corpus_to_weights_and_again_from_what_is_there(corpus, tmp_path, monkeypatch):
    curated, recipe = corpus
    monkeypatch.setattr(mixing, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 8 * 512))
    first = mix(load_recipe(recipe), curated, plan(tmp_path, floors={"digits": 0.2}), HERE)
    assert first.names == ["words", "digits"] and first.sets == ["source words", "source digits"]
    assert first.losses.shape == (4, 2) and first.proposal.weights.sum() == pytest.approx(1)
    assert first.proposal.weights[1] >= 0.2 - 1e-9
    # more words, fewer bits for words
    assert np.corrcoef(first.mixtures[:, 0], first.losses[:, 0])[0, 1] < 0
    monkeypatch.setattr(runs, "Run", None)  # nothing is trained again
    second = mix(load_recipe(recipe), curated, plan(tmp_path, floors={"digits": 0.2}), HERE)
    assert np.array_equal(second.proposal.weights, first.proposal.weights)


def test_runs_are_reused_when_a_source_is_added_and_the_proposal_is_confirmed(corpus, tmp_path, monkeypatch):
    """The swarm of two sources, then with a third, which old runs have none of; then verdicts on the mean of the
    sets, in which a small set counts as much as a large one."""
    _, reference = corpus
    monkeypatch.setattr(mixing, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 8 * 512))
    recipe = load_recipe(reference)
    two = recipe.model_copy(update={"sources": recipe.sources[:2]})
    third = json.loads(Path(reference).read_text())
    rng = np.random.default_rng(2)
    letters = [json.dumps({"text": " ".join(rng.choice(["x", "yy", "zzz", "xyz", "zyx"], 60))}) for _ in range(200)]
    (tmp_path / "letters.jsonl").write_text("\n".join(letters))
    third["sources"].append({"name": "letters", "format": "jsonl", "paths": [str(tmp_path / "letters.jsonl")]})
    (tmp_path / "three.yaml").write_text(json.dumps(third))
    both = run_recipe(third, tmp_path / "curated", "curate") / "curate"
    folder = tmp_path / "mix"
    old = mix(two, corpus[0], plan(folder), HERE)
    trained: list[str] = []
    train = mixing.run
    monkeypatch.setattr(mixing, "run", lambda task: (trained.append(task.name), train(task)))
    new = mix(load_recipe(str(tmp_path / "three.yaml")), both, plan(folder, runs=6), HERE)
    assert len(new.mixtures) == 4 + 5 and len(trained) == 5  # as many as for a source, though --runs needs two
    assert np.array_equal(new.mixtures[:4], np.column_stack([old.mixtures, np.zeros(4)]))
    assert new.sets == ["source words", "source digits", "source letters"] and np.isfinite(new.losses).all()
    assert np.abs(new.losses[:4, :2] - old.losses).max() < 0.05  # the same models, other held-out documents
    assert new.losses[4:, 2].min() < new.losses[:4, 2].min()  # who has read letters writes them best
    trained.clear()
    again = mix(load_recipe(str(tmp_path / "three.yaml")), both, plan(folder, runs=6), HERE)
    assert trained == [] and np.array_equal(again.proposal.weights, new.proposal.weights)

    monkeypatch.setattr(experiment, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 4 * 512))
    outcome = mixing.confirm(new, Plan(folder, seeds=3, flops=1e12), HERE)
    assert [row.arm for row in outcome.rows] == ["proposed", "uniform", "tempered"]
    assert {row.set_name for row in outcome.rows} == {"mean of 3 sets"}
    assert outcome.baseline_bits["mean of 3 sets"] > 0

    folders = set()
    for weights in ([0.5, 0.5, 0.0], [0.4, 0.6, 0.0]):  # another proposal of the same name is another run
        material = mixing.with_mixtures(new.material, {"proposed": np.array(weights)}, new.names)
        tasks = experiment.Tasks(material, Plan(folder, seeds=3), ProxySize(1, 32, 64, 8, 600), 4 * 512)
        folders.add(tasks.of_arm(0, 0, 0.01).folder)
    assert len(folders) == 2

    changed = load_recipe(str(tmp_path / "three.yaml"), ["seed=7"])
    assert mixing.former_swarm(folder).data.items() & mixing.data_of(changed, plan(folder, flops=2e12)).items() == set()
    stored = json.loads((folder / "swarm.json").read_text())
    (folder / "swarm.json").write_text(json.dumps(stored | {"folders": ["../.."]}))
    with pytest.raises(InputError, match=r"swarm\.json: damaged .*is no folder of a run here"):
        mix(changed, both, plan(folder), HERE)
    (folder / "swarm.json").write_text("{")
    with pytest.raises(InputError, match=r"swarm\.json: damaged .*remove it"):
        mix(changed, both, plan(folder), HERE)


def test_a_set_counts_as_much_as_another():
    texts = ("aa", "bb", "cccc") * 30
    sets = {"small": tuple(range(30)), "large": tuple(range(30, 90)), "tiny": (0,)}
    one = corpora.HeldOut(corpora.Texts(texts, ("",) * 90), sets).as_one("both")
    bits = np.arange(90.0)
    num_bytes = one.texts.num_bytes
    places = list(one.sets["both"])
    scale = one.scale(places)
    means = [bits[list(sets[name])].sum() / num_bytes[list(sets[name])].sum() for name in ("small", "large")]
    assert (bits[places] @ scale) / (num_bytes[places] @ scale) == pytest.approx(np.mean(means))


def test_cells_are_mixed_and_written_as_a_recipe(corpus, tmp_path, monkeypatch, call):
    """The recipe that stands there in the end is valid, has the proposed weights, and is read as often as proposed."""
    _, reference = corpus
    monkeypatch.setattr(mixing, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 8 * 512))
    monkeypatch.chdir(tmp_path)
    cells = {"score": "mean_word_length", "sources": ["words"], "buckets": 2, "power": 3}
    fields = json.loads(Path(reference).read_text()) | {"index": {"mix": cells}}
    Path("cells.yaml").write_text(json.dumps(fields))
    command = ("mix", "cells.yaml", "--runs", 4, "--budget", "1e12", "--tokens", 2000, "--workers", 1)
    code, said = call(*command, "--floor", "words.q01=0.3")
    assert code == 0 and "words.q01" in said and "train with: gristmill run cells-mixed.yaml" in said, said
    mixed = load_recipe("cells-mixed.yaml")
    assert sum(mixed.source_weights.values()) == pytest.approx(1, abs=1e-3)
    assert set(mixed.index.mix.repeats) == {"words.q00", "words.q01", "digits"}
    result = mix(
        load_recipe("cells.yaml"),
        Path("work/mix-mix/curated/curate"),
        plan(Path("work/mix-mix"), target_tokens=2000, floors={"words.q01": 0.3}),
        HERE,
    )
    cells = {cell_of(name): count for name, count in result.material.tokens(0).items()}
    table = mix_repeats(cells, mixed.source_weights, mixed.index.mix, 2000)
    read = [next(row.tokens * row.times / 2000 for row in table if row.cell.name == name) for name in result.names]
    assert np.abs(np.array(read) - result.proposal.weights).max() < 2e-3
    Path("cells-mixed.yaml").write_text("name: mine")
    code, said = call(*command)
    assert code == 2 and "stands there already and is not of this command" in said
    code, said = call(*command, "--output", "o.yaml", "--floor", "words=0.3")
    assert code == 1 and "--floor words: no training text has this name; there are words.q00, words.q01, digits" in said


def test_what_cannot_be_mixed_is_refused_before_training(corpus, tmp_path, monkeypatch):
    curated, recipe = corpus
    monkeypatch.setattr(runs, "Run", None)
    with pytest.raises(RecipeError, match="--floor books: no source has this name; the sources are words, digits"):
        mix(load_recipe(recipe), curated, plan(tmp_path, floors={"books": 0.1}), HERE)
    with pytest.raises(
        InputError, match=r"1,000,000,000 tokens at most 4 times each: words at most 0\.\d%.*raise --max"
    ):
        mix(load_recipe(recipe), curated, plan(tmp_path, target_tokens=10**9), HERE)
    with pytest.raises(InputError, match=r"--floor digits=0\.5: the text of digits suffices for a weight of 0\.\d+ \("):
        mix(load_recipe(recipe), curated, plan(tmp_path, target_tokens=200_000, floors={"digits": 0.5}), HERE)
    phase = {"from_tokens": 0, "weights": {"words": 1, "digits": 1}}
    with pytest.raises(RecipeError, match=r"index\.phases sets the weights of the sources"):
        mix(load_recipe(recipe, [f"index.phases={json.dumps([phase])}"]), curated, plan(tmp_path), HERE)
    with pytest.raises(RecipeError, match="1 source to train on; a mixture needs at least 2"):
        one = load_recipe(recipe)
        mix(one.model_copy(update={"sources": one.sources[:1]}), curated, plan(tmp_path), HERE)


def test_floors():
    assert parse_floors(["books=0.1"]) == {"books": 0.1}
    for text in ("books", "books=2", "books=much"):
        with pytest.raises(RecipeError, match=f"--floor {text}: write SOURCE=WEIGHT"):
            parse_floors([text])


def test_cells_of_a_mix_are_sources_of_an_arm(corpus, tmp_path):
    curated, reference = corpus
    cells = {"score": "mean_word_length", "sources": ["words"], "buckets": 2, "power": 3}
    recipe = load_recipe(reference, [f"index.mix={json.dumps(cells)}"])
    groups = {"held out": list(corpora.read_split(curated, "test", ["words", "digits"]))}
    material = prepared([Arm("mixed", recipe)], [curated], tmp_path, corpora.drawn_groups(groups, 30), HERE)
    assert material.sources == [["words.q00", "words.q01", "digits"]]
    tokens = material.tokens(0)
    assert sorted(tokens) == ["digits", "words.q00", "words.q01"]
    assert abs(tokens["words.q00"] - tokens["words.q01"]) < 0.1 * tokens["words.q00"]
    kept = with_sources(material.arms[0], material.sources[0])
    weights = sampling(kept, read_dataset(material.folders[0] / "index")).phases[0].weights
    assert weights["words.q01"] / tokens["words.q01"] > 10 * weights["words.q00"] / tokens["words.q00"]
