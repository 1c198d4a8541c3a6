"""An object store and its clients in virtual time, by a seed: requests and answers are delayed, repeated, reordered and
lost, clients stand still, die, are cut off, and have clocks that run too fast or too slow.

The clients run the production code: `Store` over the file system `VirtualFiles`, with a client's own `LeaseClock`. Each
thread of a client is a greenlet, which gives way where it waits alone, so a seed repeats a schedule exactly."""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from gristmill.foundation.runtime.store.store import Store
from gristmill.pipelines.workdir.publication import LeaseClock

ADDRESS = "memory://run"
REQUEST_SECONDS = 30.0
ATTEMPTS = 2
LOST = object()


@dataclass(frozen=True)
class Faults:
    """Probabilities and bounds of one schedule."""

    lost: float  # of a request; of an answer too
    repeated: float  # a request arrives twice
    slow: float  # a request or an answer takes up to `slow_seconds` instead of 0.2 s
    slow_seconds: float
    halts: float  # before a request a client stands still for up to `halt_seconds`
    halt_seconds: float
    dies: float  # before a request a client dies
    cut_off: float  # before a request a client is cut off for up to `halt_seconds`

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        """Calm and wild ones; in each some faults are missing."""

        def probability(most: float) -> float:
            return 0.0 if rng.random() < 0.4 else most * rng.random()

        seconds = rng.choice((1.0, 20.0, 80.0))
        return cls(
            lost=probability(0.15),
            repeated=probability(0.3),
            slow=probability(0.4),
            slow_seconds=seconds,
            halts=probability(0.15),
            halt_seconds=rng.choice((5.0, 40.0, 120.0)),
            dies=probability(0.01),
            cut_off=probability(0.03),
        )

    @classmethod
    def none(cls, rng: random.Random) -> "Faults":
        return cls(lost=0, repeated=0, slow=0, slow_seconds=0, halts=0, halt_seconds=0, dies=0, cut_off=0)

    @classmethod
    def of_one_request(cls, rng: random.Random) -> "Faults":
        """One to three kinds, likely."""
        kinds = rng.sample(("lost", "repeated", "slow", "halts", "dies", "cut_off"), rng.randint(1, 3))
        seconds = {"slow_seconds": rng.choice((2.0, 20.0)), "halt_seconds": rng.choice((5.0, 20.0))}
        return replace(cls.none(rng), **dict.fromkeys(kinds, 0.7), **seconds)


class World:
    """Virtual time: events by (time, number), and the objects of the store by name."""

    def __init__(self, seed: int, draw_faults: Callable[[random.Random], Faults] = Faults.draw):
        self.rng, self.now = random.Random(seed), 0.0
        self.faults = draw_faults(self.rng)
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.watchers: list[Callable[[Client, str], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events, self._tags = 0, 0
        self._hub = getcurrent()

    def at(self, time: float, call: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (time, self.num_events, call))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def wait(self) -> Any:
        """Of a client's greenlet: until it is switched to."""
        return self._hub.switch()

    def end(self) -> None:
        self._events.clear()

    def write(self, client: "Client", name: str, content: bytes | None) -> None:
        if content is None:
            self.objects.pop(name, None)
        else:
            self._tags += 1
            self.objects[name] = content, f'"{self._tags}"'
        for watch in self.watchers:
            watch(client, name)


@dataclass
class Client(LeaseClock):
    """A driver's machine. rate: seconds of its clock in one of the world's. faults: of requests by number, instead of
    the world's. request_seconds: its patience; it asks twice, as botocore does."""

    world: World
    name: str
    rate: float = 1.0
    request_seconds: float = REQUEST_SECONDS
    is_dead: bool = False
    faults: Mapping[int, Faults] = field(default_factory=dict)
    _num_requests: int = 0
    _halted_until: float = 0.0
    _cut_off_until: float = 0.0
    _threads: list[greenlet] = field(default_factory=list)

    def store(self) -> Store:
        store = Store.__new__(Store)  # without a look for the package of the address, which is most of its time
        store.address, store._files, store._root = ADDRESS, VirtualFiles(self), "run"
        return store

    def start(self, call: Callable[[], object]) -> None:
        thread = greenlet(lambda *_: call(), parent=self.world._hub)
        self._threads.append(thread)
        self._resume(self.world.now, thread, None)

    def die(self) -> None:
        self.is_dead = True

    def close(self) -> None:
        """Ends the threads that still wait."""
        self.is_dead = True
        for thread in self._threads:
            if thread and thread is not getcurrent():
                thread.throw(GreenletExit)

    # LeaseClock

    def sleep(self, seconds: float) -> None:
        if self.is_dead:
            raise GreenletExit
        self._resume(self.world.now + seconds / self.rate, getcurrent(), None)
        self.world.wait()

    def repeat(self, seconds: float, call: Callable[[], bool]) -> Callable[[], None]:
        states = {"running": True, "stopped": False}

        def run() -> None:
            self.sleep(seconds)
            while not states["stopped"] and call():
                self.sleep(seconds)
            states["running"] = False

        def stop() -> None:
            states["stopped"] = True
            while states["running"]:
                self.sleep(0.5)

        self.start(run)
        return stop

    # Requests

    def request(self, operation: Callable[[], Any]) -> Any:
        """What the operation gives at the store, or an OSError after all attempts; it may have happened even so."""
        if self.is_dead:
            raise GreenletExit
        self._num_requests += 1
        rng, faults = self.world.rng, self.faults.get(self._num_requests) or self.world.faults
        self._misfortune(rng, faults)
        for _ in range(ATTEMPTS):
            answer = self._attempt(operation, rng, faults)
            if answer is not LOST:
                kind, value = answer
                if kind == "raise":
                    raise value
                return value
        raise TimeoutError("no answer")

    def _misfortune(self, rng: random.Random, faults: Faults) -> None:
        now = self.world.now
        if rng.random() < faults.dies:
            self.die()
        if rng.random() < faults.halts:
            self._halted_until = now + faults.halt_seconds * rng.random()
            self.sleep(0.0)
        if rng.random() < faults.cut_off:
            self._cut_off_until = now + faults.halt_seconds * rng.random()

    def _attempt(self, operation: Callable[[], Any], rng: random.Random, faults: Faults) -> Any:
        world, thread, is_waiting = self.world, getcurrent(), [True]

        def answer(value: Any) -> None:
            if is_waiting[0] and (value is LOST or world.now >= self._cut_off_until):
                is_waiting[0] = False
                self._resumed(thread, value)

        def arrive(answer_seconds: float | None) -> None:
            try:
                value = "return", operation()
            except OSError as error:
                value = "raise", error
            if answer_seconds is not None:
                world.at(world.now + answer_seconds, lambda: answer(value))

        if world.now >= self._cut_off_until and rng.random() >= faults.lost:
            for _ in range(2 if rng.random() < faults.repeated else 1):
                back = None if rng.random() < faults.lost else _seconds(rng, faults)
                world.at(world.now + _seconds(rng, faults), lambda back=back: arrive(back))
        world.at(world.now + self.request_seconds / self.rate, lambda: answer(LOST))
        return world.wait()

    def _resume(self, time: float, thread: Any, value: Any) -> None:
        self.world.at(time, lambda: self._resumed(thread, value))

    def _resumed(self, thread: Any, value: Any) -> None:
        if self.is_dead:
            return
        if self._halted_until > self.world.now:
            self._resume(self._halted_until, thread, value)
        else:
            thread.switch(value)


def _seconds(rng: random.Random, faults: Faults) -> float:
    return rng.random() * (faults.slow_seconds if rng.random() < faults.slow else 0.2)


class VirtualFiles:
    """The part of fsspec's interface that `Store` calls, as one client has it, with the conditional writes of S3."""

    async_impl = False

    def __init__(self, client: Client):
        self._client, self._world = client, client.world

    def invalidate_cache(self) -> None:
        pass

    def cat_file(self, path: str) -> bytes:
        return self._client.request(lambda: self._object(path)[0])

    def info(self, path: str) -> dict[str, Any]:
        return self._client.request(lambda: {"ETag": self._object(path)[1]})

    def find(self, path: str, detail: bool) -> dict[str, Any]:
        def listed() -> Iterator[tuple[str, dict[str, Any]]]:
            for name, (content, _) in self._world.objects.items():
                if name.startswith(f"{path}/"):
                    yield name, {"type": "file", "size": len(content)}

        return self._client.request(lambda: dict(listed()))

    def put_file(self, source: str, path: str) -> None:
        with open(source, "rb") as file:
            self.pipe_file(path, file.read(), "overwrite")

    def pipe_file(self, path: str, content: bytes, mode: str, IfMatch: str | None = None) -> None:
        def write() -> None:
            present = self._world.objects.get(path)
            if (mode == "create" and present is not None) or (IfMatch and (present is None or present[1] != IfMatch)):
                raise FileExistsError(path)
            self._world.write(self._client, path, content)

        self._client.request(write)

    def rm_file(self, path: str) -> None:
        self._client.request(lambda: self._world.write(self._client, path, None))

    def _object(self, path: str) -> tuple[bytes, str]:
        if path not in self._world.objects:
            raise FileNotFoundError(path)
        return self._world.objects[path]
