"""Schedules of drivers that publish into one virtual store, and the laws that hold in each. As a program:
MIRRORS FIRST COUNT [small] runs these seeds and prints {"schedules": N, "events": N, "taken_over": N, "broken": []}."""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from greenlet import getcurrent

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME, StageIdentity, output_files, write_manifest
from gristmill.foundation.runtime.store.store import Store
from gristmill.pipelines.workdir.publication import BEAT_SECONDS, POINTER_NAME, Published, RemoteLease, folder_name
from gristmill.pipelines.workdir.remote import RemoteWork
from tests.simulation.virtual_store import Client, Faults, World

STAGES = ("curate", "tokenizer")
CALM_AT = 900.0  # seconds: from then on nothing fails, and a last driver must succeed
CALM_SECONDS = 1500.0
SMALL_SECONDS = 60.0
SMALL_REQUESTS = 24  # of a command, about
NO_FAULTS: Mapping[int, Faults] = {}


@dataclass(frozen=True)
class Mirror:
    """A complete work folder. names: folder of each stage below STAGE/. objects: content by name in the store."""

    folder: Path
    names: Mapping[str, str]
    objects: Mapping[str, bytes]

    @classmethod
    def write(cls, folder: Path, recipe: str, content: str) -> "Mirror":
        names, objects = {}, {}
        for stage in STAGES:
            for name in ("counts.json", "shards/a.parquet"):
                (folder / stage / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / stage / name).write_text(f"{stage} {name} {content}")
            manifest = write_manifest(folder / stage, StageIdentity(stage, 1, {"recipe": recipe}), {}, {})
            names[stage] = folder_name(manifest.fingerprint, (folder / stage / MANIFEST_NAME).read_bytes())
            for path in [*output_files(folder / stage), folder / stage / MANIFEST_NAME]:
                place = path.relative_to(folder / stage).as_posix()
                objects[f"run/{stage}/{names[stage]}/{place}"] = path.read_bytes()
        (folder / "lock.json").write_text(recipe)
        return cls(folder, names, objects)


def write_mirrors(base: Path) -> list[Mirror]:
    """Two recipes, and the second with other bytes, as other versions of libraries write them."""
    kinds = (("first", "x"), ("second", "y"), ("second", "z"))
    return [Mirror.write(base / f"{recipe}-{content}", recipe, content) for recipe, content in kinds]


@dataclass
class Session:
    """One command of a driver. Times of the world; leased: None while it has no lease."""

    client: Client
    began: float
    leased: float | None = None
    published: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class Schedule:
    """One seed. lease_class: the production's, or one with a fault."""

    seed: int
    mirrors: list[Mirror]
    lease_class: type[RemoteLease] = RemoteLease
    broken: list[str] = field(default_factory=list)
    stages: ClassVar[Sequence[str]] = STAGES
    beat_seconds: ClassVar[float] = BEAT_SECONDS
    draw_faults: ClassVar[Callable[[random.Random], Faults]] = Faults.draw

    def __post_init__(self) -> None:
        self.world = World(self.seed, self.draw_faults)
        self.sessions: list[Session] = []
        self._objects = {name: content for mirror in self.mirrors for name, content in mirror.objects.items()}
        self._pointer = Published()
        self.world.watchers.append(self._watch)
        self._clients: list[Client] = []

    def run(self) -> list[str]:
        """The laws that were broken, each as a sentence."""
        rng = self.world.rng
        for _ in range(rng.choice((2, 2, 2, 3))):
            mirror, pause = rng.choice(self.mirrors), 60.0 * rng.random()
            self._start(lambda mirror=mirror, pause=pause: self._drive(mirror, pause, tries=rng.choice((1, 2))))
        self.world.at(CALM_AT, self._calm)
        self.world.run(CALM_AT + CALM_SECONDS)
        if not self._is_done:
            self._break("no driver could publish although nothing failed any more")
        return self._end()

    def _end(self) -> list[str]:
        self.world.end()
        for client in self._clients:
            client.close()
        return self.broken

    def _start(self, call: Callable[[], None], faults: Mapping[int, Faults] = NO_FAULTS) -> None:
        rate = self.world.rng.choice((0.3, 1.0, 1.0, 3.0))
        name = f"client {len(self._clients)}"
        client = Client(self.world, name, rate, 7.5 * self.beat_seconds, faults=faults)
        self._clients.append(client)
        self._is_done = False
        client.start(call)

    def _calm(self) -> None:
        self.world.faults = replace(
            self.world.faults, **dict.fromkeys(("lost", "repeated", "slow", "halts", "dies", "cut_off"), 0.0)
        )

        def last() -> None:
            for _ in range(60):
                self._drive(self.mirrors[0], 0.0, tries=1)
                if self.sessions[-1].published == list(STAGES):
                    self._is_done = True
                    self.world.end()
                    return
                self._clients[-1].sleep(30.0)

        self._start(last)

    def _client(self) -> Client:
        return next(client for client in self._clients if getcurrent() in client._threads)

    def _drive(self, mirror: Mirror, pause: float, tries: int) -> None:
        """The command, up to `tries` times while it fails."""
        client = self._client()
        store = client.store()
        for _ in range(tries):
            client.sleep(pause)
            session = Session(client, self.world.now)
            self.sessions.append(session)
            try:
                lease = self.lease_class(store, lambda _: None, self.beat_seconds, client)
                session.leased = self.world.now
                try:
                    for stage in self.stages:
                        client.sleep(5 * self.beat_seconds * self.world.rng.random())
                        self._publish(mirror, store, stage, lease)
                        self._check_published(session, stage, mirror.names[stage])
                    return
                finally:
                    lease.release()
            except InputError as error:
                session.error = str(error)

    def _publish(self, mirror: Mirror, store: Store, stage: str, lease: RemoteLease) -> None:
        RemoteWork(mirror.folder, store).publish(stage, lease)

    # Laws

    def _check_published(self, session: Session, stage: str, name: str) -> None:
        session.published.append(stage)
        is_replaced = any(self._follows(other, session) for other in self.sessions)  # who may have published since
        if not is_replaced and self._pointer.stages.get(stage) != name:
            self._break(f"{session.client.name} published {stage}, and the pointer does not name it")

    def _watch(self, client: Client, name: str) -> None:
        if name == f"run/{POINTER_NAME}":
            self._watch_pointer(client)
        expected = self._objects.get(name)
        if expected is not None and self.world.objects.get(name, (None,))[0] != expected:
            self._break(f"{name} was written with other bytes")

    def _watch_pointer(self, client: Client) -> None:
        content = json.loads(self.world.objects[f"run/{POINTER_NAME}"][0])
        before, self._pointer = self._pointer, Published(**content)
        if self._pointer.writer < before.writer or self._pointer.version <= before.version:
            self._break(f"the pointer went back from {before} to {self._pointer}")
        session = next(session for session in reversed(self.sessions) if session.client is client)
        if any(self._succeeds(other, session) for other in self.sessions):
            self._break(f"{client.name} published over its successor")
        for stage, folder in self._pointer.stages.items():
            missing = [name for name in self._objects if name.startswith(f"run/{stage}/{folder}/")]
            if not missing or any(name not in self.world.objects for name in missing):
                self._break(f"the pointer names {stage}/{folder}, which is not whole")

    def _follows(self, later: Session, earlier: Session) -> bool:
        """Whether one got its lease after the other had its own; it may have begun before."""
        return earlier.leased is not None and later.leased is not None and later.leased > earlier.leased

    def _succeeds(self, later: Session, earlier: Session) -> bool:
        """Whether one's lease was begun after the other had its own, and was got."""
        return earlier.leased is not None and later.leased is not None and later.began > earlier.leased

    def _break(self, law: str) -> None:
        self.broken.append(f"seed {self.seed}, {self.world.now:.1f} s: {law}")


class SmallSchedule(Schedule):
    """Two commands, near in time, that publish the manifest of one stage; nothing is read from a disk, and what comes
    after them is not tried: a tenth of a schedule's time."""

    stages = STAGES[:1]
    beat_seconds = 1.0
    draw_faults = Faults.none

    def run(self) -> list[str]:
        rng = self.world.rng
        self._pointer = Published(version=1)
        self.world.objects[f"run/{POINTER_NAME}"] = self._pointer.content(), '"0"'
        self._objects = {name: content for name, content in self._objects.items() if name.endswith(MANIFEST_NAME)}
        for start, num_faults in ((0.0, rng.choice((1, 2, 3))), (1.0 + 6.0 * rng.random(), rng.choice((0, 0, 1, 2)))):
            mirror = rng.choice(self.mirrors)
            faults = {rng.randint(1, SMALL_REQUESTS): Faults.of_one_request(rng) for _ in range(num_faults)}
            self._start(lambda mirror=mirror, start=start: self._drive(mirror, start, tries=1), faults)
        self.world.run(SMALL_SECONDS)
        return self._end()

    def _publish(self, mirror: Mirror, store: Store, stage: str, lease: RemoteLease) -> None:
        lease.check()
        place = f"{stage}/{mirror.names[stage]}/{MANIFEST_NAME}"
        store.put_bytes(place, mirror.objects[f"run/{place}"])
        lease.publish(lambda published: replace(published, stages={**published.stages, stage: mirror.names[stage]}))


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    base, first, count = Path(arguments[1]), int(arguments[2]), int(arguments[3])
    schedule_class = SmallSchedule if arguments[4:] == ["small"] else Schedule
    mirrors = write_mirrors(base)
    broken: list[str] = []
    events = taken_over = 0
    for seed in range(first, first + count):
        schedule = schedule_class(seed, mirrors)
        broken += schedule.run()
        events += schedule.world.num_events
        taken_over += any("took this work folder over" in session.error for session in schedule.sessions)
    print(json.dumps({"schedules": count, "events": events, "taken_over": taken_over, "broken": broken[:20]}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
