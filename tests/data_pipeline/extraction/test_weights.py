import numpy as np
import pytest

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import extract
from gristmill.data_pipeline.extraction.weights import BUNDLED_PATH, load_weights, save_weights, weights_digest
from gristmill.foundation.errors import InputError


def test_weights_are_written_and_read_as_they_are(tmp_path):
    weights = load_weights("bundled")
    save_weights(tmp_path / "again.npz", weights)
    assert (tmp_path / "again.npz").read_bytes() == BUNDLED_PATH.read_bytes()
    assert weights.provenance["pages"] > 900 and weights.provenance["lightgbm"]
    assert weights_digest(str(tmp_path / "again.npz")) == weights_digest("bundled")


@pytest.mark.parametrize("content", [b"", b"PK", b"text"])
def test_a_file_that_holds_no_weights_says_so(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"bad.npz.*gristmill extractor fit"):
        extract(b"<p>a", None, "blocks", BlocksConfig(weights=str(tmp_path / "bad.npz")))
    with pytest.raises(InputError, match=r"none.npz.*gristmill extractor fit"):
        load_weights(str(tmp_path / "none.npz"))


def test_trees_with_indices_out_of_range_are_refused(tmp_path):
    weights = load_weights("bundled")
    for stage, change in (
        ("first", {"children": np.full_like(weights.first.children, 10_000_000)}),
        ("first", {"roots": weights.first.roots - 1}),
        ("first", {"depths": np.full_like(weights.first.depths, 1 << 30)}),
        ("second", {"features": np.full_like(weights.second.features, 10_000)}),
        ("second", {"values": weights.second.values[:-1]}),
    ):
        trees = getattr(weights, stage)._replace(**change)
        save_weights(tmp_path / "bad.npz", weights._replace(**{stage: trees}))
        with pytest.raises(InputError, match=f"damaged trees of the {stage} stage"):
            load_weights(str(tmp_path / "bad.npz"))
        (tmp_path / "bad.npz").unlink()
