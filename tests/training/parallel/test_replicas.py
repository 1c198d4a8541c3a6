"""What one replica of several takes part in."""

from unittest.mock import Mock

from gristmill.training.parallel.mesh import Axis
from gristmill.training.parallel.replicas import ReplicaProcess, data_axis, left_out_samples
from gristmill.training.planner.layout_checks import config_of_replica
from tests.support.training_runs import MODEL, train_config


def test_samples_of_lost_replicas_are_left_out() -> None:
    assert left_out_samples(range(12), members=(0, 2), replicas=3) == [range(4, 8)]
    assert left_out_samples(range(12, 24), members=(1,), replicas=3) == [range(12, 16), range(20, 24)]
    assert left_out_samples(range(12), members=(0, 1, 2), replicas=3) == []


def test_a_replica_is_a_training_of_its_own_with_the_micro_batches_of_the_whole() -> None:
    layout = {"data": 4, "replicate": 2, "tensor": 2, "lost_replicas": "continue"}
    own = config_of_replica(MODEL, train_config(layout=layout)).layout
    assert (own.data, own.replicate, own.tensor, own.world_size, own.micro_batch) == (2, 1, 2, 4, 1)


def test_data_ranks_are_counted_over_all_replicas() -> None:
    process = ReplicaProcess(Mock(), replica=1, replicas=3, rank=0, ranks=2, incarnation=1, port=0)
    assert data_axis(Axis(size=2, rank=1), process) == Axis(size=6, rank=3)
