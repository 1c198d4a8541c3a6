"""The checkpoints that are kept."""

import resource
import weakref

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from gristmill.foundation.errors import explain_disk_error
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    load_model,
    saved_tensors,
    step_folder,
    steps_in,
)
from gristmill.training.checkpoint.save import Saver, kept_steps, save_streamed
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import CheckpointConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import single_process


def test_the_last_regular_checkpoints_and_the_newest_stay() -> None:
    config = CheckpointConfig(every=100, keep_last=2)
    assert kept_steps([100, 137, 200, 300], config, finished=False) == {200, 300}
    assert kept_steps([100, 137], config, finished=False) == {100, 137}  # 137: saved because of a stop
    assert kept_steps([100, 200, 300, 337], config, finished=False) == {200, 300, 337}


def test_every_nth_stays_for_good() -> None:
    config = CheckpointConfig(every=10, keep_last=1, keep_every=30)
    assert kept_steps(list(range(10, 81, 10)), config, finished=False) == {30, 60, 80}


def test_the_last_checkpoint_of_a_finished_run_counts_as_regular() -> None:
    config = CheckpointConfig(every=100, keep_last=2)
    assert kept_steps([100, 200, 250], config, finished=True) == {200, 250}
    assert kept_steps([250], CheckpointConfig(every=0), finished=True) == {250}


# A streamed checkpoint is that of the whole model, and holds one tensor at a time.

CONFIG = ModelConfig(layers=4, width=32, heads=4, sequence_length=16, moe={"experts": (0, 4), "top_k": 2})


def content_of(empty: Transformer) -> CheckpointContent:
    tensors = saved_tensors(dict(empty.named_parameters()), saved_buffers(empty))
    return CheckpointContent(tensors, SavedModelConfig.of(CONFIG, 99, 0))


def test_tensors_are_written_and_let_go(tmp_path):
    model = Transformer(CONFIG, 99)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    held, most = [], 0

    def stream():
        nonlocal most
        for name, parameter in model.named_parameters():
            tensor = parameter.detach().clone()
            held.append(weakref.ref(tensor))
            yield f"model.{name}", tensor
            del tensor
            most = max(most, sum(reference() is not None for reference in held))

    save_streamed(tmp_path, 0, content_of(Transformer(CONFIG, 99)), stream(), lambda: {"made": "here"})
    found, config = load_model(step_folder(tmp_path, 0))
    assert config == CONFIG and most <= 2
    for name, value in model.named_parameters():
        assert torch.equal(found.get_parameter(name), value), name


def test_a_stream_in_another_order_is_an_error_and_leaves_no_checkpoint(tmp_path):
    empty = Transformer(CONFIG, 99)
    stream = ((f"model.{name}", torch.zeros(value.shape)) for name, value in reversed(list(empty.named_parameters())))
    with pytest.raises(CheckpointException, match=r"comes where model\.embedding\.weight"):
        save_streamed(tmp_path, 0, content_of(empty), stream, dict)
    assert not step_folder(tmp_path, 0).exists()


@pytest.mark.parametrize("limit", [100, 10_000, 100_000])
@pytest.mark.parametrize("how", ["at once", "in the background", "streamed"])
def test_a_disk_that_fills_is_an_error_of_the_disk(tmp_path, how, limit):
    """A limit on file sizes fails the write of tensors as a full disk does; torch would raise a RuntimeError about its
    archive. No checkpoint is left."""
    tensors = {f"model.{number}": torch.zeros(30_000) for number in range(4)}
    content = CheckpointContent(tensors, SavedModelConfig())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError) as caught:
            if how == "streamed":
                save_streamed(tmp_path, 1, content, iter(()), dict)
            else:
                saver = Saver(tmp_path, CheckpointConfig(every=1, asynchronous=how != "at once"), single_process())
                saver.save(1, content, finished=False)
                saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the file is larger than the disk or a limit" in explain_disk_error(caught.value)
    assert steps_in(tmp_path) == []
