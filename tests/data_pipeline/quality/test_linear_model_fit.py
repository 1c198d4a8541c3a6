"""The fit of the linear model: what it tells apart, its calibration, and what cannot be fitted."""

import numpy as np
import pytest

from gristmill.data_pipeline.quality.linear_model import FitSettings, fit_linear_model, load_linear_model
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.foundation.errors import InputError
from tests.support.corpora import prose

SETTINGS = FitSettings(features=2**12)
GOOD = [prose(k) for k in range(60)]
BAD = [prose(1000 + k).replace("the", "buy now").replace("river", "cheap") for k in range(60)]


def noisy(share: float, count: int, seed: int) -> list[str]:
    """Texts in which this share of the words is `good`, on average."""
    rng = np.random.default_rng(seed)
    chances = [share, 0.2 - share, *[0.1] * 8]
    return [" ".join(rng.choice(["good", "bad", *"cdefghij"], 30, p=chances)) for _ in range(count)]


def test_a_model_tells_the_classes_apart_and_survives_the_disk(tmp_path):
    model = fit_linear_model(GOOD, BAD, SETTINGS)
    assert model.report["auc"] > 0.95 and model.report["documents"] == {"good": 60, "bad": 60}
    assert model.report["measured_documents"] == 12
    scores = model.scores(TextBuffer.of([*GOOD[:5], *BAD[:5], "", " \n"]))
    assert scores[:5].min() > 0.5 > scores[5:10].max() and np.isnan(scores[10:]).all()
    model.save(tmp_path / "m.safetensors")
    loaded = load_linear_model(tmp_path / "m.safetensors")
    texts = TextBuffer.of(GOOD + BAD)
    assert loaded.scores(texts).tolist() == model.scores(texts).tolist() and loaded.report == model.report
    assert (loaded.label_scores(texts, "bad") + loaded.scores(texts)).tolist() == [1.0] * 120


def test_the_model_does_not_depend_on_the_order_of_the_texts(tmp_path):
    fit_linear_model(GOOD, BAD, SETTINGS).save(tmp_path / "one")
    fit_linear_model(GOOD[::-1], BAD[::-1], SETTINGS).save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_scores_are_probabilities_also_for_classes_of_other_sizes():
    """Of new texts with scores near s, the share s is good where both classes are as frequent."""
    model = fit_linear_model(noisy(0.13, 1500, 1), noisy(0.07, 500, 2), SETTINGS)
    assert model.report["calibration_error"] < 0.1
    scores = model.scores(TextBuffer.of(noisy(0.13, 1000, 3) + noisy(0.07, 1000, 4)))
    is_good = np.arange(2000) < 1000
    for low, high in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        chosen = (scores >= low) & (scores < high)
        assert is_good[chosen].mean() == pytest.approx(scores[chosen].mean(), abs=0.08)


def test_copies_are_never_both_trained_on_and_measured():
    """With labels at random, copies on both sides of the split would be recognized."""
    rng = np.random.default_rng(0)
    texts = [prose(k) for k in range(200)]
    order = rng.permutation(200)
    good, bad = ([texts[k] for k in order[half::2]] * 3 for half in (0, 1))
    try:
        assert fit_linear_model(good, bad, SETTINGS).report["auc"] < 0.75
    except InputError as error:
        assert "cannot be told apart" in str(error)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (GOOD, BAD[:19], "19 distinct documents of the class 'bad'; a model needs 20 of each"),
        (GOOD, [*GOOD[:50], *BAD[:10]], r"10 distinct documents of .* \(100 that are in both classes are left out\)"),
        ([], BAD, "0 distinct documents of the class 'good'"),
        (["a mill"] * 30, BAD, "1 distinct documents of the class 'good'"),
        (["a mill" + " " * n for n in range(40)], [" " * n + "a  mill" for n in range(40)], "have one score"),
    ],
)
def test_classes_that_cannot_be_fitted_are_refused(good, bad, message):
    with pytest.raises(InputError, match=message):
        fit_linear_model(good, bad, SETTINGS)
