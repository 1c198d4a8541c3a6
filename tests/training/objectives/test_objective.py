"""The samples of a step, on any number of data ranks and with a batch size ramp."""

from types import SimpleNamespace

import numpy as np
import torch

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.train import TrainConfig
from gristmill.training.objectives.objective import Batches, collate
from gristmill.training.parallel.mesh import Axis, single_process
from gristmill.training.trainer import Progress, Trainer
from tests.support.causal_samples import causal_samples


class Numbered:
    """Sample k is all k, in two documents of 3 and 5 tokens."""

    vocab_size, fingerprint = 100, "numbered"

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        rows = np.ones((len(numbers), 8), dtype=np.int64)
        tokens = rows * np.array(numbers)[:, None]
        return {
            "tokens": tokens,
            "targets": tokens + 1,
            "weights": rows.astype(np.float32),
            "positions": rows * [0, 1, 2, 0, 1, 2, 3, 4],
            "documents": rows * [0, 0, 0, 1, 1, 1, 1, 1],
        }

    def source_of(self, k: int) -> str:
        return "all"


def test_ranks_take_runs_of_the_same_stream() -> None:
    def drawn(size: int) -> list[int]:
        ranks = [Batches(causal_samples(Numbered()), Axis(size, rank), torch.device("cpu")) for rank in range(size)]
        for batches in ranks:
            batches.prepare(12, 4)
        return torch.cat([batches.take(12, 4)["tokens"][:, 0] for batches in ranks]).tolist()

    assert drawn(1) == drawn(2) == drawn(4) == [12, 13, 14, 15]


def test_masked_documents_have_positions_and_numbers() -> None:
    batch = collate(causal_samples(Numbered(), mask_documents=True), range(2))
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 2
    assert batch["positions"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch["samples"].tolist() == [0, 1]


def test_documents_stay_on_the_host_for_a_context_axis() -> None:
    source = causal_samples(Numbered(), mask_documents=True)
    axis, device = Axis(1, 0), torch.device("meta")
    batch = Batches(source, axis, device, on_host=True).take(0, 2)
    host = batch.pop("host_documents")
    assert host.device.type == "cpu" and host.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]] * 2
    assert batch.keys() == Batches(source, axis, device).take(0, 2).keys()
    assert {values.device for values in batch.values()} == {device}


def test_a_growing_batch_leaves_no_sample_out() -> None:
    config = TrainConfig(
        tokens=8 * 20, batch_tokens=8 * 4, batch_ramp={"start_tokens": 8, "increment_tokens": 8, "over_tokens": 48}
    )
    passes = SimpleNamespace(loss=causal_loss())
    trainer = Trainer(
        config,
        SimpleNamespace(sequence_length=8, has_experts=False, norm_parameters=[]),
        passes,
        None,
        None,
        single_process(),
    )
    steps = []
    while not trainer.finished:
        after = trainer._progress_after_batch()
        steps.append(list(range(trainer.progress.samples, after.samples)))
        trainer.progress = after
    assert steps == [[0], [1], [2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21, 22]]
    assert trainer.progress == Progress(8, 23 * 8, 23)
