"""Finding checkpoints and tokenizers from any folder of a run."""

import pytest

from gristmill.evaluation.inference.workdir import (
    CheckpointPaths,
    HeldOutCorpus,
    Workdir,
    checkpoints_folder,
    find_checkpoint,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import StageIdentity, write_manifest


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 5 and 100000000, whose names do not sort by step."""
    for step in ("step-00000005", "step-100000000", "step-00000007.partial"):
        (tmp_path / "run" / "train" / "checkpoints" / step).mkdir(parents=True)
    (tmp_path / "run" / "tokenizer").mkdir()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "run"


def test_the_newest_checkpoint_is_found_from_every_folder_of_a_run(run):
    newest = run / "train" / "checkpoints" / "step-100000000"
    for path in (run, run / "train", run / "train" / "checkpoints", newest):
        assert find_checkpoint(path) == newest
    assert find_checkpoint(newest.with_name("step-00000005")) == newest.with_name("step-00000005")
    assert checkpoints_folder(run / "tokenizer") is None
    with pytest.raises(InputError, match="no such folder"):
        find_checkpoint(run / "absent")


def test_a_checkpoint_is_resolved_with_its_tokenizer(run, tmp_path):
    newest = run / "train" / "checkpoints" / "step-100000000"
    assert CheckpointPaths(run).resolve() == (newest, run / "tokenizer")
    assert CheckpointPaths(run, tmp_path).resolve() == (newest, tmp_path)
    (run / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer in its folder or its run; name the tokenizer"):
        CheckpointPaths(run).resolve()


def test_a_work_folder_is_found_from_its_checkpoints_only(run, tmp_path):
    assert Workdir.of_checkpoint(find_checkpoint(run)) == Workdir(run)
    (tmp_path / "elsewhere" / "step-00000005").mkdir(parents=True)
    assert Workdir.of_checkpoint(tmp_path / "elsewhere" / "step-00000005") is None


def test_the_held_out_corpus_needs_both_stages_complete(run):
    workdir = Workdir(run)
    assert workdir.manifests() == {} and workdir.held_out_corpus() is None
    for stage, origin in (("curate", {"recipe": {"seed": 7}}), ("index", {})):
        assert workdir.held_out_corpus() is None
        (run / stage).mkdir()
        write_manifest(run / stage, StageIdentity(stage, 1), {}, origin)
    assert workdir.held_out_corpus() == HeldOutCorpus(run / "curate", run / "index", 7)
    assert list(workdir.manifests()) == ["curate", "index"]
