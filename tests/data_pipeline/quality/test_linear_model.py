"""The file of the linear model: what is no such file is refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from gristmill.data_pipeline.quality.linear_model import FORMAT, LinearModel, load_linear_model
from gristmill.foundation.errors import InputError

WEIGHTS = np.zeros(16, np.float32)
HEADER = {"version": 1, "ngram": 2, "scale": 1.0, "offset": 0.0, "labels": ["good", "bad"], "report": {}}
REPORT = {"auc": 0.9, "calibration_error": 0.1, "measured_documents": 3, "reliability": []}


@pytest.mark.parametrize(
    ("weights", "change", "message"),
    [
        (WEIGHTS, {"version": 2}, "version 2, this program reads 1"),
        (WEIGHTS, {"ngram": 9}, "n-grams of 9 tokens"),
        (WEIGHTS, {"scale": 1e400}, "does not describe a model"),
        (WEIGHTS, {"labels": ["good"]}, "does not describe a model"),
        (WEIGHTS, {"report": {"auc": 0.9}}, "does not describe a model"),
        (WEIGHTS, {"report": REPORT | {"auc": "high"}}, "does not describe a model"),
        (WEIGHTS[:12], {}, "weights of shape"),
        (WEIGHTS.astype(np.float64), {}, "type float64"),
        (WEIGHTS * np.nan, {}, "not finite"),
    ],
)
def test_a_description_that_the_kernels_cannot_follow_is_refused(tmp_path, weights, change, message):
    path = tmp_path / "m.safetensors"
    save_file({"weights": weights}, path, {FORMAT: json.dumps(HEADER | change)})
    with pytest.raises(InputError, match=message):
        load_linear_model(path)


def test_another_safetensors_file_and_a_damaged_one_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"weights": WEIGHTS}, path)
    with pytest.raises(InputError, match="no model of `gristmill quality fit`"):
        load_linear_model(path)
    LinearModel(WEIGHTS, 2, 1.0, 0.0).save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match="cannot be read"):
        load_linear_model(path)
