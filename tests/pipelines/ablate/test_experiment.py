"""An ablation from end to end with models of a few thousand parameters; what is shared, held out and remembered."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.data_pipeline.decontamination.ngram_index import build_index, words_of
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate import corpora, experiment, runs
from gristmill.pipelines.ablate.ablation_report import terminal_table, write_report
from gristmill.pipelines.ablate.corpora import Arm, Texts, arms_of
from gristmill.pipelines.ablate.runs import ProxySize
from gristmill.pipelines.python_api import run as run_recipe
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.train_tokenizer import train
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer

HERE = LocalEngine(1, Reporter.silent())


@pytest.fixture(scope="module")
def arms(tmp_path_factory) -> tuple[list[Arm], list[Path]]:
    """A corpus of sentences, and an arm whose words stand in another order."""
    folder = tmp_path_factory.mktemp("ablate")
    rng = np.random.default_rng(1)
    nouns, verbs = ["miller", "stone", "river", "farmer", "sack", "wheel"], ["turns", "grinds", "carries", "fills"]
    for name in ("plain", "shuffled"):
        lines = []
        for number in range(300):
            sentences = [
                f"The {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)} {number}." for _ in range(9)
            ]
            words = " ".join(sentences).split()
            text = " ".join(rng.permutation(words) if name == "shuffled" else words)
            lines.append(json.dumps({"text": text}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nsources:\n  - {{name: s, format: jsonl, paths: [{folder}/{name}.jsonl]}}\n"
            "curate: {filters: [], near_dedup: null, splits: {validation: 0.0, test: 0.2}}\n"
        )
    found = arms_of([str(folder / "plain.yaml"), str(folder / "shuffled.yaml")], [])
    workdirs = [run_recipe(arm.recipe.model_dump(mode="json"), folder / arm.name, "curate") for arm in found]
    return found, [workdir / "curate" for workdir in workdirs]


@pytest.fixture
def small(monkeypatch):
    """Models of one layer, eight steps; rates as they are."""
    monkeypatch.setattr(experiment, "choose_size", lambda *_: (ProxySize(1, 32, 64, 8, 600), 8 * 512))


def test_from_recipes_to_verdicts_and_again_from_what_is_there(arms, small, tmp_path, monkeypatch):
    plan = experiment.Plan(tmp_path, seeds=3, documents=40)
    first = experiment.experiment(*arms, plan, HERE)
    assert {row.set_name for row in first.rows} == {
        "all held-out documents", "held out of baseline", "held out of arm1"
    }  # fmt: skip
    assert all(row.decision in ("better", "worse", "no decision") for row in first.rows)
    assert first.rates[1] == pytest.approx(first.rates[0] / 10)
    page = write_report(first, tmp_path).read_text()
    assert "Decisions" in page and "recipe shuffled" in page and "no decision" in terminal_table(first)
    assert json.loads((tmp_path / "ablation.json").read_bytes())["rows"][0]["arm"] == "arm1"
    monkeypatch.setattr(runs, "Run", None)  # nothing is trained again
    again = experiment.experiment(*arms, plan, HERE)
    assert [row.tuned.effect for row in again.rows] == [row.tuned.effect for row in first.rows]


def test_an_arm_against_itself_differs_by_nothing(arms, small, tmp_path):
    (baseline, _), (corpus, _) = arms
    twin = Arm("arm1", baseline.recipe)
    outcome = experiment.experiment([baseline, twin], [corpus, corpus], experiment.Plan(tmp_path, seeds=3), HERE)
    assert [(row.decision, row.tuned.effect, row.low.effect) for row in outcome.rows] == [
        ("no decision", 0.0, 0.0)
    ] * len(outcome.rows)


def test_a_cooldown_trains_the_shared_part_once(arms, small, tmp_path):
    """For each seed and rate one run to 80 %; a twin of the baseline goes on from it to the same model."""
    (baseline, _), (corpus, _) = arms
    plan = experiment.Plan(tmp_path, seeds=3, cooldown=True)
    outcome = experiment.experiment([baseline, Arm("arm1", baseline.recipe)], [corpus, corpus], plan, HERE)
    assert {row.tuned.effect for row in outcome.rows} == {0.0}
    names = [folder.name for folder in tmp_path.glob("shared-*/runs/*")]
    assert sum(name.startswith("shared-seed") for name in names) == 3 * 2
    assert sum(name.startswith("arm1-seed") for name in names) == 3 * 2
    assert all(len(curve) == 2 for curve in outcome.curves["arm1"])  # of 8 steps the last 2
    assert "one run to 80% of 4,096 tokens" in terminal_table(outcome)


def test_weights_alone_make_runs_and_no_corpus(arms, small, tmp_path):
    """The arms share documents, tokenizer and index bytes."""
    (baseline, _), (corpus, _) = arms
    plan = experiment.Plan(tmp_path, seeds=3)
    experiment.experiment([baseline, Arm("arm1", baseline.recipe)], [corpus, corpus], plan, HERE)
    (shared,) = tmp_path.glob("shared-*")
    first, second = ((shared / arm / "index/train/s.bin").read_bytes() for arm in ("baseline", "arm1"))
    assert first == second
    assert len(list(shared.glob("tokenizer*"))) == 1


def test_copies_of_held_out_documents_are_not_trained_on():
    held_out = [" ".join(f"w{number}" for number in range(start, start + 40)) for start in (0, 100)]
    index = build_index(words_of(held_out), corpora.NGRAM, corpora.MIN_NGRAM)
    whole = held_out[0]
    edited = held_out[0].replace("w20", "other")
    excerpt = " ".join(held_out[1].split()[:20])
    quoting = held_out[1][: len(" ".join(held_out[1].split()[:18]))] + " " + " ".join(f"x{n}" for n in range(60))
    unrelated = " ".join(f"y{number}" for number in range(50))
    expected = [True, True, True, False, False]
    assert corpora.are_copies(index, [whole, edited, excerpt, quoting, unrelated]).tolist() == expected


def test_a_vocabulary_leaves_room_for_words_beside_the_characters_of_many_scripts():
    latin = "plain words of one script, " * 400
    assert corpora.tokenizer_settings([latin], 384) == TokenizerConfig(vocab_size=384)
    scripts = "".join(chr(0x4E00 + number % 600) for number in range(1200))
    mixed = corpora.tokenizer_settings([latin * 10, scripts], 547)
    assert mixed.vocab_size == 547 and corpora.MIN_COVERAGE <= mixed.character_coverage < 0.999
    assert corpora.tokenizer_settings([scripts * 20], 384).vocab_size > 258 + 2 * 500
    several = corpora.tokenizer_settings([latin, scripts], 384)
    train([latin, scripts], several.model_copy(update={"vocab_size": several.vocab_size - 400}))


def test_too_few_documents_are_said_before_anything_is_trained(arms, tmp_path):
    recipes, folders = arms
    with pytest.raises(InputError, match=r"too few held-out documents \(held out of baseline 10, .*at least 30"):
        experiment.experiment(recipes, folders, experiment.Plan(tmp_path, documents=10), HERE)


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", '{"text": "a"}\n{"txt": 1}\n'), ("t.jsonl", "[1]"), ("t.txt", b"\xff")]
)
def test_a_target_that_cannot_be_read_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=rf"--target .*{name}"):
        corpora.target_texts(path)


def test_targets_are_paragraphs_or_records(tmp_path):
    (tmp_path / "t.txt").write_text("One\nparagraph.\n\n\n\nAnother.\n")
    assert corpora.target_texts(tmp_path / "t.txt") == ["One\nparagraph.", "Another.\n"]
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    assert corpora.target_texts(tmp_path / "t.jsonl") == ["a", "b"]


def test_targets_alone_are_the_only_texts_to_score(arms, tmp_path, call):
    recipes, folders = arms
    (tmp_path / "t.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(40)))
    target = (tmp_path / "t.txt",)
    alone = corpora.hold_out(recipes, folders, target, 400, targets_alone=True)
    assert set(alone.sets) == {"target t.txt"} and len(alone.texts.texts) == 40
    assert set(corpora.hold_out(recipes, folders, target, 400).sets) > set(alone.sets)
    code, said = call("ablate", "demo", "--vary", "curate.near_dedup=none", "--targets-alone")
    assert code == 2 and "--targets-alone: no --target is named" in said


class Bytes:
    end_of_document = 0

    def encode(self, text: str) -> list[int]:
        return [byte % 50 + 1 for byte in text.encode()]


def test_bits_of_a_text_longer_than_a_window_are_those_of_its_windows():
    model = Transformer(ModelConfig(layers=1, width=8, heads=1, sequence_length=16), 64)
    initialize(model, 0, torch.device("cpu"), torch.float32)
    causal_lm = LocalCausalLM(model, 16)
    text = "grain and flour and bread and water"
    ids = Bytes().encode(text)
    windows = [(0, ids[:16]), (ids[15], ids[16:32]), (ids[31], ids[32:])]
    requests = [Request((before,), tuple(window)) for before, window in windows]
    expected = -sum(scored.logprob for scored in score(causal_lm, requests, 64)) / np.log(2)
    scored = runs.bits_of_texts(causal_lm, Bytes(), Texts((text, ""), ("", "")))
    assert scored == pytest.approx([expected, 0.0])


def test_bits_of_an_answer_are_those_behind_its_context():
    model = Transformer(ModelConfig(layers=1, width=8, heads=1, sequence_length=16), 64)
    initialize(model, 0, torch.device("cpu"), torch.float32)
    causal_lm = LocalCausalLM(model, 16)
    context, answer = "what is made of grain?", "flour"
    before, ids = [0, *Bytes().encode(context)], Bytes().encode(answer)
    expected = -score(causal_lm, [Request(tuple(before[-12:]), tuple(ids))], 64)[0].logprob / np.log(2)
    assert runs.bits_of_texts(causal_lm, Bytes(), Texts((answer,), (context,))) == pytest.approx([expected])
