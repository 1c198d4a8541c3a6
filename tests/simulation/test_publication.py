"""Publication of stages in simulated schedules; the former protocols break the laws that today's keeps."""

from dataclasses import replace

import pytest

pytest.importorskip("greenlet", reason="greenlet is not installed")

from gristmill.pipelines.workdir.publication import POINTER_NAME, Published, RemoteLease
from tests.simulation.schedules import Schedule, SmallSchedule, main, write_mirrors

FEW, MANY = 200, 100_000
FEW_SMALL = 5_000  # of .8 ms; `make schedules` runs 100,000
UNTIL_FAULT = 1_000  # of small ones, of which one in 40 and one in 100 shows it; the first of these ends the search


class LeaseOfTwoSteps(RemoteLease):
    """The protocol until November 2026: the lease is checked, and the pointer written in a second step."""

    def publish(self, change):
        self.check()
        published, _ = Published.read(self._store)
        new = replace(change(published), writer=self._number, version=published.version + 1)
        self.check()
        self._store.put_bytes(POINTER_NAME, new.content())


class LeaseWithoutFence(RemoteLease):
    """Compare-and-swap, but a new writer leaves the pointer as it is until it publishes."""

    def publish(self, change):
        if change(probe := Published(writer=-1)) is not probe:
            super().publish(change)


@pytest.fixture(scope="module")
def mirrors(tmp_path_factory):
    return write_mirrors(tmp_path_factory.mktemp("mirrors"))


def test_a_seed_repeats_its_schedule(mirrors):
    runs = [Schedule(7, mirrors) for _ in range(2)]
    assert [run.run() for run in runs] == [[], []]
    assert runs[0].world.objects.keys() == runs[1].world.objects.keys()
    assert runs[0].world.num_events == runs[1].world.num_events > 100


@pytest.mark.parametrize("lease_class", [LeaseOfTwoSteps, LeaseWithoutFence])
def test_a_protocol_with_a_known_fault_publishes_over_a_successor(mirrors, lease_class):
    laws = (law for seed in range(UNTIL_FAULT) for law in SmallSchedule(seed, mirrors, lease_class).run())
    assert any("published over its successor" in law or "the pointer went back" in law for law in laws)


def test_no_schedule_breaks_a_law(mirrors):
    """Among them are writers that are replaced while they live, refused ones, and ones without an answer."""
    schedules = [Schedule(seed, mirrors) for seed in range(FEW)]
    assert [law for schedule in schedules for law in schedule.run()] == []
    errors = [session.error for schedule in schedules for session in schedule.sessions]
    for part in ("took this work folder over", "writes here", "no answer", "holds other files for the same recipe"):
        assert sum(part in error for error in errors) > 5, part


def test_no_small_schedule_breaks_a_law(mirrors):
    assert [law for seed in range(FEW_SMALL) for law in SmallSchedule(seed, mirrors).run()] == []


def test_the_program_fails_where_a_law_is_broken(tmp_path, monkeypatch, capsys):
    command, run = ["schedules", str(tmp_path), "0", "100", "small"], SmallSchedule.run
    assert main(command) == 0
    monkeypatch.setattr(SmallSchedule, "run", lambda schedule: [*run(schedule), f"seed {schedule.seed}"])
    assert main(command) == 1 and '"broken": ["seed 0", "seed 1",' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("schedule_class", [Schedule, SmallSchedule])
def test_no_schedule_of_many_breaks_a_law(mirrors, schedule_class):
    assert [law for seed in range(MANY) for law in schedule_class(seed, mirrors).run()] == []
