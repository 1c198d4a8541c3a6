"""The checkpoints that are kept."""

from gristmill.training.config import CheckpointConfig
from gristmill.training.saver import kept_steps


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
