"""Refused connections: all ranks try again together, then report them."""

import threading

import pytest
import torch.distributed as dist

from gristmill.foundation.errors import InputError
from gristmill.training import processes
from gristmill.training.processes import CONNECTION_ATTEMPTS, RankInfo, connect

REFUSED = "Gloo connectFullMesh failed with connect [127.0.1.1]:35123: Connection refused\nmore"


class Ranks:
    """Two ranks as threads over one store; `refused` are the (rank, attempt) pairs whose connection fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: set[tuple[int, int]]):
        self.refused, self.made, self.undone = refused, [[], []], [0, 0]
        self.store = dist.HashStore()
        monkeypatch.setattr(processes.dist, "init_process_group", self.init)
        monkeypatch.setattr(processes.dist, "destroy_process_group", self.destroy)
        monkeypatch.setattr(processes, "SECONDS_BETWEEN_ATTEMPTS", 0.0)

    def init(self, backend, store, rank, world_size, timeout):
        self.made[rank].append(store)
        if (rank, len(self.made[rank])) in self.refused:
            raise RuntimeError(REFUSED)

    def destroy(self):
        self.undone[int(threading.current_thread().name)] += 1

    def run(self) -> list[str | None]:
        said: list[str | None] = [None, None]

        def connected(rank: int) -> None:
            try:
                connect("gloo", self.store, rank, 2, processes.timedelta(seconds=5))
            except InputError as error:
                said[rank] = str(error)

        threads = [threading.Thread(target=connected, args=(rank,), name=str(rank)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return said


def test_one_refused_connection_is_tried_again_by_all_under_other_names(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, {(1, 1), (0, 2)})
    assert ranks.run() == [None, None]
    assert [len(made) for made in ranks.made] == [3, 3]
    assert ranks.undone == [1, 1]  # rank 0 had connected in the first attempt, rank 1 in the second
    ranks.made[0][0].set("address", "of a dead one")
    assert not ranks.made[0][1].check(["address"])


def test_the_end_of_the_attempts_is_named_on_all_ranks(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, {(1, attempt) for attempt in range(1, CONNECTION_ATTEMPTS + 1)})
    for said in ranks.run():
        assert said.startswith(f"the processes could not connect in {CONNECTION_ATTEMPTS} attempts; rank 1: Gloo")
        assert "Connection refused; check that" in said and "more" not in said


def test_the_number_of_restarts_is_read(monkeypatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RESTART_COUNT", "2")):
        monkeypatch.setenv(name, value)
    assert RankInfo.from_environment() == RankInfo(3, 1, 4, restarts=2)


def test_a_rank_that_never_answers_is_an_error_and_no_hang(monkeypatch) -> None:
    store = dist.HashStore()
    store.set_timeout(processes.timedelta(milliseconds=50))
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *_, **__: None)
    with pytest.raises(InputError, match="another rank did not report whether it connected"):
        connect("gloo", store, 0, 2, processes.timedelta(seconds=5))
