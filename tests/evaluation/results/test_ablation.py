"""Effects of data on trained models: statistics against scipy, coverage by simulation, and DCLM's public runs."""

import itertools
import json
import math

import numpy as np
import pytest
import zstandard
from scipy import stats

from gristmill.evaluation.results.ablation import LEVEL, ArmScores, Effect, decide, effects, holm, votes, what_it_takes
from gristmill.foundation.errors import InputError

EFFECT = 0.02


def simulated(
    rng: np.random.Generator, arms: int, seeds: int, documents: int, spread: tuple[float, float, float], effect: float
) -> list[ArmScores]:
    """spread: standard deviations in bits per byte of a seed, of a document's effect, and of both together."""
    of_seed, of_document, of_both = spread
    bytes_D = np.round(rng.lognormal(6, 1, documents))
    base_D = rng.normal(1, 0.2, documents)
    scores = []
    for arm in range(arms):
        shift_D = base_D + (rng.normal(effect, of_document, documents) if arm else 0)
        noise_SD = rng.normal(0, of_seed, seeds)[:, None] + rng.normal(0, of_both, (seeds, documents))
        scores.append(ArmScores(str(arm), (shift_D + noise_SD) * bytes_D, bytes_D))
    return scores


def by_hand(name: str, bits: list[float], documents: int = 40) -> ArmScores:
    """Every document has 1 byte and, under seed s, bits[s] bits."""
    return ArmScores(name, np.repeat(np.array(bits)[:, None], documents, axis=1), np.ones(documents))


def test_with_equal_documents_it_is_the_paired_t_test_over_seeds():
    first, second = [1.00, 1.03, 0.98], [0.95, 0.97, 0.96]
    (effect,) = effects(by_hand("a", first), [by_hand("b", second)])
    reference = stats.ttest_rel(second, first)
    assert effect.effect == pytest.approx(np.mean(second) - np.mean(first))
    assert effect.degrees == pytest.approx(2)
    assert effect.p == pytest.approx(reference.pvalue)
    assert effect.interval() == pytest.approx(tuple(reference.confidence_interval(1 - LEVEL)))


def test_without_noise_of_seeds_it_is_the_paired_t_test():
    rng = np.random.default_rng(3)
    documents_D = rng.normal(1, 0.2, 50), rng.normal(1.05, 0.2, 50)
    arms = [ArmScores(name, np.tile(bits, (3, 1)), np.ones(50)) for name, bits in zip("ab", documents_D, strict=True)]
    (effect,) = effects(arms[0], arms[1:])
    reference = stats.ttest_rel(documents_D[1], documents_D[0])
    assert (effect.p, effect.degrees) == (pytest.approx(reference.pvalue), pytest.approx(49))


@pytest.mark.parametrize(
    ("arms", "seeds", "documents", "spread"),
    [
        (2, 3, 100, (0.01, 0.05, 0.02)),
        (2, 3, 300, (0.01, 0.0, 0.0)),
        (2, 3, 300, (0.0, 0.05, 0.02)),
        (2, 5, 200, (0.01, 0.2, 0.2)),
        (4, 3, 200, (0.01, 0.05, 0.05)),
        (2, 3, 200, (0.01, 0.05, 0.05)),
        (2, 6, 200, (0.005, 0.05, 0.05)),
    ],
)
def test_the_intervals_cover_the_true_effect(arms, seeds, documents, spread):
    """95 % of them, within 93 to 97 %."""
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(4000 // (arms - 1)):
        drawn = simulated(rng, arms, seeds, documents, spread, EFFECT)
        intervals = [effect.interval() for effect in effects(drawn[0], drawn[1:])]
        covered += [low <= EFFECT <= high for low, high in intervals]
    assert 0.93 <= np.mean(covered) <= 0.97


def test_equal_arms_are_decided_in_at_most_the_level():
    """Three arms against a baseline at two learning rates, after correction."""
    rng = np.random.default_rng(2)
    decided = 0
    for _ in range(300):
        rates = [simulated(rng, 4, 3, 100, (0.01, 0.02, 0.02), 0.0) for _ in range(2)]
        verdicts = decide([effects(arms[0], arms[1:]) for arms in rates])
        decided += any(decision != "no decision" for decision, _ in verdicts)
    assert decided <= 300 * LEVEL


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


def effect_of(value: float, error: float) -> Effect:
    return Effect("b", value, error, 2.0, 3, 100, 2 * error**2, error**2 / 10)


def test_both_rates_must_agree():
    sure, unsure = effect_of(-0.1, 0.01), effect_of(-0.1, 0.09)
    assert decide([[sure], [sure]])[0][0] == "better"
    assert decide([[effect_of(0.1, 0.01)]])[0][0] == "worse"
    assert decide([[sure], [unsure]])[0][0] == "no decision"
    assert decide([[sure], [effect_of(0.1, 0.01)]])[0][0] == "no decision"


def test_what_it_takes_is_enough():
    effect = effect_of(-0.02, 0.012)
    seeds = int(what_it_takes(effect, 1).removesuffix(" seeds"))
    rng = np.random.default_rng(5)
    decided = 0
    for _ in range(200):
        spread = (math.sqrt(effect.seed_variance / 2), math.sqrt(effect.document_variance * 100), 0.0)
        arms = simulated(rng, 2, seeds, 100, spread, effect.effect)
        decided += effects(arms[0], arms[1:])[0].p < LEVEL
    assert 0.6 < decided / 200 < 0.95  # planned for 0.8; documents of unequal length count for fewer
    assert "within the noise of training" in what_it_takes(effect_of(-1e-6, 0.01), 1)


def test_tasks_that_decide_like_a_coin_do_not_vote():
    assert votes("arc_easy") and votes("openbookqa")
    assert not votes("boolq") and not votes("winogrande") and not votes("lambada_openai")


def test_too_little_to_decide_is_said():
    with pytest.raises(InputError, match="1 seeds of each arm; at least 3"):
        effects(by_hand("a", [1.0]), [by_hand("b", [1.0])])
    with pytest.raises(InputError, match="20 held-out documents; at least 30"):
        effects(by_hand("a", [1.0, 1.1, 1.0], 20), [by_hand("b", [1.0, 1.1, 1.0], 20)])
    with pytest.raises(InputError, match="arm b: scored other documents"):
        effects(by_hand("a", [1.0, 1.1, 1.0]), [by_hand("b", [1.0, 1.1, 1.0], 50)])


# DCLM's models of 412M parameters against those of 7B on the same data sets (mlfoundations/dclm, exp_data).

CORE = {  # the 22 tasks of low variance (Li et al. 2024, arXiv 2406.11794, appendix G) and their numbers of questions
    "hellaswag_zeroshot": 10042, "jeopardy": 2117, "bigbench_qa_wikidata": 20321, "arc_easy": 2376,
    "arc_challenge": 1172, "copa": 100, "commonsense_qa": 1221, "piqa": 1838, "openbook_qa": 500,
    "lambada_openai": 5153, "hellaswag": 10042, "winograd": 273, "winogrande": 1267, "bigbench_dyck_languages": 1000,
    "agi_eval_lsat_ar": 230, "bigbench_cs_algorithms": 1320, "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32, "squad": 10570, "coqa": 7983, "boolq": 3270,
    "bigbench_language_identification": 10000,
}  # fmt: skip
SIZES = {
    "training/open_lm_configs/d=1024_l=24_h=8.json": "412M",
    "training/open_lm_configs/open_lm_7b_swiglutorch.json": "7B",
    "open_lm_7b": "7B",
}


def lines(path):
    return [
        json.loads(line)
        for line in zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).splitlines()
    ]


def test_decisions_from_dclms_small_runs_hold_at_7b(shared_data):
    """A margin from the small runs alone, the error of sampling the tasks' questions at 90 %, is right in at least 90 %
    of the pairs that it decides, and decides at least 60 % of them."""
    models = {model["uuid"]: model for model in lines(shared_data("ablation/dclm/models.jsonl.zst"))}
    best: dict[tuple[str, str], dict] = {}
    for result in lines(shared_data("ablation/dclm/evals.jsonl.zst")):
        model = models.get(result.get("model_uuid"), {"hyperparameters": {}})
        size = SIZES.get(model["hyperparameters"].get("model"))
        if size and model["hyperparameters"].get("chinchilla_multiplier") == 1:
            key = (size, model["dataset_name"])
            score = result["low_variance_datasets_centered"]
            if key not in best or score > best[key]["low_variance_datasets_centered"]:
                best[key] = result
    datasets = sorted({name for size, name in best if size == "412M"} & {name for size, name in best if size == "7B"})
    questions = np.array(list(CORE.values()))
    scores = np.array([[best["412M", name]["eval_metrics"]["icl"][task] for task in CORE] for name in datasets])
    large = [best["7B", name]["low_variance_datasets_centered"] for name in datasets]
    means, variances = scores.mean(axis=1), (scores * (1 - scores) / questions).sum(axis=1) / len(CORE) ** 2
    pairs = list(itertools.combinations(range(len(datasets)), 2))
    assert len(pairs) == 55
    z = stats.norm.isf(0.05)
    decided = [(a, b) for a, b in pairs if abs(means[a] - means[b]) > z * math.sqrt(variances[a] + variances[b])]
    right = [(means[a] - means[b]) * (large[a] - large[b]) > 0 for a, b in decided]
    print(f"{len(decided)} of {len(pairs)} decided, {np.mean(right):.1%} right")
    assert len(decided) >= 0.6 * len(pairs) and np.mean(right) >= 0.9
