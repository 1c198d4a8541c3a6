"""Objectives that cannot train are refused before the first step, with file, line and what to change."""

from pathlib import Path
from typing import Any

import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.objective import ObjectiveInputs, TermSpec
from gristmill.training.objectives.objective_names import objective_identity
from tests.support.training_runs import MODEL, Counting, new_run

GOOD = """
import numpy as np
from gristmill.training.objectives.objective import Objective, Term

class Mine(Objective):
    def sample(self, k):
        drawn = self.inputs.samples.sample(k)
        return {"tokens": drawn["tokens"], "targets": drawn["targets"], "weights": drawn["weights"]}

    def loss(self, model, batch):
        nll, _ = model.token_losses(batch["targets"], batch["weights"])
        return [Term("nll", nll, "weights")]

    def predict(self, model, batch):
        return {"best": model.best_tokens()}
"""


def checked(folder: Path, source: str, class_name: str = "Mine", options: dict[str, Any] | None = None) -> Any:
    path = folder / "mine.py"
    path.write_text(source)
    inputs = ObjectiveInputs(Counting(), MODEL, Counting.vocab_size, 0, 0)
    return checked_loss(make_objective(f"{path}:{class_name}", options or {}, inputs))


def test_a_users_file_gives_its_terms(tmp_path: Path) -> None:
    assert checked(tmp_path, GOOD).terms == (TermSpec("nll", "weights", 1.0),)


BAD = [
    ("import numpy as np\n", "import no_such_module\n", r"mine\.py:2: does not load: ModuleNotFoundError"),
    ("class Mine", "class Mine Mine", r"mine\.py:5: does not load"),
    ("class Mine", "class Other", r"has no class 'Mine' that derives from Objective; it has \['Other'\]"),
    ('drawn["weights"]}', 'drawn["wights"]}', r"mine\.py:8: sample\(0\) fails: KeyError: wights"),
    ('{"tokens":', '{"words":', r"sample\(0\) has the fields .* and no `tokens`"),
    ('"tokens": drawn["tokens"]', '"tokens": drawn["tokens"][:7]', r"tokens are int64\[7\]; give integers \[16\]"),
    ('"tokens": drawn["tokens"]', '"tokens": drawn["tokens"] + 40', r"tokens run from .* allowed are 0 to 49"),
    ('"tokens": drawn["tokens"]', '"samples": np.ones(1), "tokens": drawn["tokens"]', "the engine adds itself"),
    (
        'drawn["weights"]}',
        'drawn["weights"][k:]}',
        r"field 'weights' is float32\[16\] in sample\(0\) and float32\[15\]",
    ),
    ('drawn["weights"]}', '"one"}', r"sample\(0\) returns dict; return a dict of numpy arrays"),
    (
        'batch["targets"]',
        'batch["labels"]',
        r"mine\.py:11: loss fails .*'targets', 'tokens', 'weights'.*KeyError: labels",
    ),
    ("model.token_losses", "model.losses", r"mine\.py:11: loss fails .* no attribute 'losses'"),
    ('nll, "weights")]', 'nll, "labels")]', "counts by the field 'labels', which sample.k. does not make"),
    (
        'Term("nll", nll,',
        'Term("nll", nll.sum(),',
        r"term 'nll': sum is \[\] for a batch of 2; give one number for each",
    ),
    ('[Term("nll", nll, "weights")]', "nll", r"mine\.py:10: returns Tensor; return a list of Term"),
    ('"weights")]', '"weights"), Term("nll", nll)]', "two terms of one name"),
    ('"weights")]', '"weights", 0.0)]', "no term with a weight depends on the model"),
    ("nll, _ = model.token_losses", "x = model.output('tag'); nll, _ = model.token_losses", "has no output 'tag'"),
    ("nll, _ = model.token_losses", "x = model.teacher; nll, _ = model.token_losses", "there is no teacher"),
    ("model.best_tokens()}", "model.best_tokens()[0]}", r"mine\.py:14: 'best' is \[16\] for a batch of 2"),
    ("import numpy as np\n", "raise SystemExit(0)\n", r"mine\.py:2: does not load: SystemExit: 0"),
    ("import numpy as np\n", "\0\n", r"mine\.py.*: does not load"),
    (
        "    def predict",
        "    def scores(self, model):\n        pass\n\n    def predict",
        r"Mine\.scores is called with \(k, pr",
    ),
    ("def predict", "def predicted", r"mine\.py: Mine does not define predict"),
    ("def sample(self, k)", "def sample(self)", r"mine\.py:6: Mine\.sample is called with \(k\) and too many"),
    (
        "def loss(self, model, batch)",
        "def loss(self, model)",
        r"mine\.py:10: Mine\.loss is called with \(model, ",
    ),
    ("    def sample", "    Options = dict\n\n    def sample", "Mine.Options is no class that derives from Config"),
    ("    def sample", "    data = 'pairs'\n\n    def sample", r"Mine.data is 'pairs'; one of \('windows', 'sen"),
    (
        "    def sample",
        "    def __init__(self, inputs, options):\n        self.a = 1\n\n    def sample",
        r"mine\.py:6: does not set self.inputs and self.options",
    ),
    (
        "    def sample",
        "    def __init__(self):\n        pass\n\n    def sample",
        r"mine\.py:6: cannot be made: TypeError",
    ),
    ('drawn["weights"]}', 'np.array(["a", "b"])}', r"mine\.py:6: sample\(0\) field 'weights' is <U1; give booleans"),
    ('drawn["weights"]}', "np.array([None])}", r"sample\(0\) field 'weights' is object"),
    ('"tokens": drawn', "5: drawn", r"sample\(0\) has a field 5"),
    (
        '"targets": drawn',
        '"teacher": drawn["tokens"], "targets": drawn',
        "has a field 'teacher', which the engine adds",
    ),
    ('"tokens": drawn["tokens"]', '"tokens": np.zeros((0, 16), dtype=int)', r"tokens are int64\[0, 16\]; give"),
    (
        '"tokens": drawn["tokens"]',
        '"tokens": drawn["tokens"].astype(float)',
        r"tokens are float64\[16\]; give integers",
    ),
    ('"targets": drawn', '"documents": np.zeros(16), "targets": drawn', r"documents are float64\[16\], tok"),
    (
        'drawn["weights"]}',
        "np.random.rand(16)}",
        "another field 'weights' when it is drawn again",
    ),
    ('"weights")]', '"weights", "high")]', r"mine\.py:10: term 'nll': weight is 'high'; give a number"),
    ('"weights")]', '"weights", float("nan"))]', "weight is nan; give a number"),
    ('[Term("nll", nll, "weights")]', '[Term(None, nll, "weights")]', r"one without: \[None\]"),
    ('[Term("nll", nll, "weights")]', "[]", "returns list; return a list of Term, at least one"),
]


@pytest.mark.parametrize(("there", "instead", "says"), BAD, ids=[case[2][:40] for case in BAD])
def test_what_cannot_train_is_refused(there: str, instead: str, says: str, tmp_path: Path) -> None:
    assert there in GOOD
    with pytest.raises(RecipeError, match=says):
        checked(tmp_path, GOOD.replace(there, instead))


SHARED = """
    def __init__(self, inputs, options):
        super().__init__(inputs, options)
        self.tokens = np.zeros(16, dtype=np.int64)

    def sample(self, k):
        drawn = self.inputs.samples.sample(k)
        self.tokens[:] = drawn["tokens"]
        return {"tokens": self.tokens, "targets": drawn["targets"], "weights": drawn["weights"]}

    def unused"""


def test_arrays_that_are_written_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sample\(1\) changes the arrays that sample\(0\) returned; return new ones"):
        checked(tmp_path, GOOD.replace("\n    def sample", SHARED))


LATER = {
    "fails on a later sample": (
        "drawn = self",
        "assert k != 9; drawn = self",
        r"mine\.py:7: sample\(9\) fails: AssertionError",
    ),
    "has other shapes later": (
        'drawn["weights"]}',
        'drawn["weights"][int(k == 9):]}',
        r"mine\.py:6: the samples 8 to 11 do not fit together",
    ),
    "has other tokens later": (
        '"tokens": drawn["tokens"]',
        '"tokens": drawn["tokens"] + 50 * (k == 9)',
        r"mine\.py:6: in the samples 8 to 11 tokens run from .* allowed are 0 to 49",
    ),
    "fails on a later batch": (
        "nll, _ =",
        "assert 9 not in batch.get('samples', []); nll, _ =",
        r"mine\.py:11: loss fails: AssertionError",
    ),
    "has other terms later": (
        '"weights")]',
        '"weights", 2.0 if 9 in batch.get("samples", []) else 1.0)]',
        r"mine\.py:10: returns .*weight=2\.0.* after .*weight=1\.0.*; return the same terms for every batch",
    ),
    "has no data at the end": ("drawn = self", "assert k < 19; drawn = self", r"mine\.py:7: sample\(19\) fails"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_goes_wrong_in_the_run_is_named(name: str, tmp_path: Path) -> None:
    there, instead, says = LATER[name]
    (tmp_path / "mine.py").write_text(GOOD.replace(there, instead))
    with pytest.raises(RecipeError, match=says):
        run = new_run(tmp_path / "run", objective=f"{tmp_path}/mine.py:Mine", tokens=20 * 16, checkpoint={"every": 0})
        assert name != "has no data at the end"  # this one is known before the first step
        run.train()


def test_experts_need_the_weights_of_tokens(tmp_path: Path) -> None:
    model = ModelConfig.model_validate(MODEL.model_dump() | {"moe": {"experts": 4}})
    path = tmp_path / "mine.py"
    for count, refused in (('"weights")]', False), ("None)]", True)):
        path.write_text(GOOD.replace('"weights")]', count))
        objective = make_objective(f"{path}:Mine", {}, ObjectiveInputs(Counting(), model, 50, 0, 0))
        if refused:
            with pytest.raises(RecipeError, match="count the first term by it"):
                checked_loss(objective)
        else:
            checked_loss(objective)


def test_unknown_options_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.objective_options\.rate: .*; .* takes \[\]"):
        checked(tmp_path, GOOD, options={"rate": 1})
    inputs = ObjectiveInputs(Counting(), MODEL, 50, 0, 0)
    with pytest.raises(RecipeError, match=r"'casual' is not one of .*'causal'"):
        make_objective("casual", {}, inputs)
    with pytest.raises(RecipeError, match=r"gone\.py: No such file"):
        make_objective(f"{tmp_path}/gone.py:Mine", {}, inputs)


def test_the_identity_is_the_files_digest_and_not_its_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(GOOD)
    first, second = (objective_identity(f"{tmp_path / name}/mine.py:Mine", {}) for name in ("a", "b"))
    assert first == second
    (tmp_path / "b/mine.py").write_text(GOOD + "\n")
    assert objective_identity(f"{tmp_path}/b/mine.py:Mine", {}) != first
