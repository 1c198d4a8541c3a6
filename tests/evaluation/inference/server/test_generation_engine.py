"""An engine whose model is sharded gives the completions of one process, and ends when a rank is lost."""

import threading

import pytest
import torch

from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.load_model import load_for_evaluation, load_for_evaluation_sharded
from gristmill.evaluation.inference.server.generation_engine import (
    GenerationEngine,
    ServerBusyError,
    Ticket,
    announcer,
    follow,
)
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.parallel.mesh import build_mesh

REQUESTS = [  # more than the two slots, so that some wait; one is drawn, and one is cancelled
    GenerationRequest((256, 1, 2, 3), GenerationSettings(9), 0),
    GenerationRequest((256, 9), GenerationSettings(200), 1),
    GenerationRequest((256, 4, 5), GenerationSettings(12, SamplingConfig(temperature=1.0, seed=5)), 2),
    GenerationRequest((256,), GenerationSettings(3), 3),
]
CANCELLED = 1


def new_batch(loaded):
    return ContinuousBatch(loaded.causal_lm, loaded.tokenizer, BatchLimits(2, 64))


def completed(engine):
    """The tokens of each request that was not cancelled."""
    found, ended = {}, threading.Semaphore(0)

    def done_of(index):
        def done(result):
            found[index] = [list(each.tokens) for each in result.generations]
            ended.release()

        return done

    tickets = [Ticket(request, None, done_of(index)) for index, request in enumerate(REQUESTS)]
    engine.start()
    engine.submit(tickets[:2])
    engine.cancel([tickets[CANCELLED]])
    engine.submit(tickets[2:])
    for _ in range(len(REQUESTS) - 1):
        assert ended.acquire(timeout=60)
    engine.stop()
    return found


def completed_after_a_late_cancellation(engine):
    """As completed, but the cancelled request runs when it is cancelled, so every rank has to let it go."""
    found, ended, begun = {}, threading.Semaphore(0), threading.Event()

    def done_of(index):
        def done(result):
            found[index] = [list(each.tokens) for each in result.generations]
            ended.release()

        return done

    streams = [(lambda *_: begun.set()) if index == CANCELLED else None for index in range(len(REQUESTS))]
    tickets = [Ticket(request, streams[index], done_of(index)) for index, request in enumerate(REQUESTS)]
    engine.start()
    engine.submit(tickets[:2])
    assert begun.wait(60)
    engine.cancel([tickets[CANCELLED]])
    engine.submit(tickets[2:])
    for _ in range(len(REQUESTS) - 1):
        assert ended.acquire(timeout=60)
    engine.stop()
    found.pop(CANCELLED, None)
    return found


def cancelled_on_ranks(checkpoint, tokenizer_folder, layout):
    """(what rank 0 completed, requests that a rank's own batch lets go)."""
    mesh = build_mesh(layout, 2, torch.device("cpu"))
    source = CheckpointPaths(checkpoint, tokenizer_folder)
    loaded = load_for_evaluation_sharded(source, EvaluateConfig(), layout, mesh)
    let_go = []

    def watched_batch():
        batch = new_batch(loaded)
        cancel = batch.cancel
        batch.cancel = lambda number: (let_go.append(number), cancel(number))
        return batch

    if mesh.is_first:
        return completed_after_a_late_cancellation(GenerationEngine(watched_batch, 8, announcer(mesh.world))), let_go
    follow(watched_batch, mesh.world)
    return None, let_go


def test_a_request_cancelled_while_it_runs_leaves_the_batch_of_every_rank(random_checkpoint, tokenizer_folder, pool):
    checkpoint = random_checkpoint()
    layout = LayoutConfig(tensor=2, sequence_parallel=False)
    (completed_0, let_go_0), (_, let_go_1) = pool.run(2, cancelled_on_ranks, checkpoint, tokenizer_folder, layout)
    assert let_go_0 == let_go_1 and let_go_0[0] == CANCELLED  # the others leave as they end
    loaded = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    assert completed_0 == completed_after_a_late_cancellation(GenerationEngine(lambda: new_batch(loaded), 8))


def served_on_ranks(checkpoint, tokenizer_folder, layout):
    mesh = build_mesh(layout, 2, torch.device("cpu"))
    source = CheckpointPaths(checkpoint, tokenizer_folder)
    loaded = load_for_evaluation_sharded(source, EvaluateConfig(), layout, mesh)
    if mesh.is_first:
        return completed(GenerationEngine(lambda: new_batch(loaded), 8, announcer(mesh.world)))
    follow(lambda: new_batch(loaded), mesh.world)
    return None


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_complete_as_one_process(axis, random_checkpoint, tokenizer_folder, pool):
    checkpoint = random_checkpoint()
    layout = LayoutConfig(**{axis: 2}, sequence_parallel=False)
    found = pool.run(2, served_on_ranks, checkpoint, tokenizer_folder, layout)
    loaded = load_for_evaluation(CheckpointPaths(checkpoint, tokenizer_folder), EvaluateConfig())
    expected = completed(GenerationEngine(lambda: new_batch(loaded), 8))
    expected.pop(CANCELLED, None)
    found[0].pop(CANCELLED, None)
    assert found == [expected, None] and len(expected) == len(REQUESTS) - 1


def test_a_lost_rank_ends_the_engine_and_its_requests(random_checkpoint, tokenizer_folder):
    loaded = load_for_evaluation(CheckpointPaths(random_checkpoint(), tokenizer_folder), EvaluateConfig())

    def announce(turn):
        if turn.added:
            raise RuntimeError("Connection closed by peer")

    engine, results, failed = GenerationEngine(lambda: new_batch(loaded), 8, announce), [], threading.Event()
    engine.start(failed.set)
    engine.submit([Ticket(REQUESTS[0], None, results.append)])
    assert failed.wait(60)
    engine.stop()
    assert "another process of the model was lost" in str(results[0].error) and "closed by peer" in str(engine.failure)
    with pytest.raises(ServerBusyError, match="stopping"):
        engine.submit([Ticket(REQUESTS[0], None, results.append)])
