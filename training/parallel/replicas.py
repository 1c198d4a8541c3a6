"""A process of a replica that may be lost: it sums gradients with the same process of the other replicas, and takes the
state of a replica that has one.

A round is a piece of work that all members do: the sum of a step's gradients, the files of a step, the state for
joiners. Each process tells the driver whether it did its part, and waits for the driver's decision, which is the same
for all: the round counts, or the members that are left do it again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from gristmill.foundation.errors import InputError
from gristmill.training.parallel.mesh import Axis, local

Round = Literal["gradients", "files", "state"]
CONNECT_SECONDS = 20.0  # all members connect at once, after a decision; one that dies meanwhile is waited for so long
POLL_SECONDS = 1.0
CHUNK_ELEMENTS = 1 << 22  # of the gradients, that are received of every member at a time


@dataclass(frozen=True)
class Decision:
    """The end of a round. done: it counts. members: the replicas of the next round, ascending; joiners: those of them
    that have no state yet. leader: the replica that writes the files and gives its state to joiners. epoch: grows when
    the members connect anew."""

    done: bool
    epoch: int
    members: tuple[int, ...]
    joiners: tuple[int, ...]
    leader: int


@dataclass(frozen=True)
class ReplicaProcess:
    """The place of a process among the replicas, as the driver tells it. replica: its number, of `replicas`. rank: in
    the replica, of `ranks`. incarnation: a number that no process group had before. port: of the driver's store."""

    connection: Connection
    replica: int
    replicas: int
    rank: int
    ranks: int
    incarnation: int
    port: int


class Replicas:
    """The other replicas, as one process sees them. on_wait is called while it waits for the driver."""

    def __init__(self, process: ReplicaProcess, timeout_seconds: float):
        self.process, self.timeout = process, timedelta(seconds=timeout_seconds / 2)  # the watchdog comes later
        self.on_wait: Callable[[], None] = lambda: None
        self._store = dist.TCPStore("127.0.0.1", process.port, is_master=False)
        self._group: dist.ProcessGroup | None = None
        self._decision: Decision | None = None
        self._problem = ""

    @property
    def decision(self) -> Decision:
        assert self._decision is not None, "join comes first"
        return self._decision

    @property
    def leads(self) -> bool:
        return self.decision.leader == self.process.replica

    def left_out(self, samples: range, members: Sequence[int]) -> list[range]:
        return left_out_samples(samples, members, self.process.replicas)

    def join(self) -> None:
        """Waits until the driver lets this replica take part: at the start, or between two steps."""
        self.process.connection.send(("ready", None))
        self._take_decision()

    def end_round(self, name: Round, ok: bool) -> bool:
        """Whether the round counts; if not, it is done again. ok: this process did its part."""
        self.process.connection.send(("vote", (name, None if ok else self._problem)))
        self._take_decision()
        return self.decision.done

    def sum_gradients(self, gradients: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """(the numbers, float64[n], summed over the members; the members whose samples are in the sums). The gradients
        become their sums, in the order of the replicas, once all members have them; until then they are kept."""
        own = torch.cat([gradient.reshape(-1) for gradient in gradients])
        while True:
            members = self.decision.members
            sums = self._try(self._sum_all, [own, numbers])
            if self.end_round("gradients", sums is not None):
                break
        assert sums is not None, "a round counts where every process did its part"
        for gradient, part in zip(gradients, sums[0].split([value.numel() for value in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return sums[1], members

    def share_state(
        self, tensors: Iterable[Tensor], state: Callable[[], dict[str, Any]], restore: Callable[[dict[str, Any]], None]
    ) -> None:
        """Joiners have the leader's state afterwards: the local shards of the tensors, by position, and the rest, which
        `restore` takes. Does nothing where no replica joins."""
        shards = [local(tensor) for tensor in tensors]
        while self.decision.joiners:
            joins = self.process.replica in self.decision.joiners
            root = self.decision.members.index(self.decision.leader)
            own = orjson.dumps(state()) if self.leads else b""
            rest = self._try(self._broadcast, shards, own, root, joins)
            if joins and rest is not None:
                restore(orjson.loads(rest))
            self.end_round("state", rest is not None)

    def _take_decision(self) -> None:
        try:
            while not self.process.connection.poll(POLL_SECONDS):
                self.on_wait()
            decision: Decision = self.process.connection.recv()
        except (EOFError, OSError) as error:
            raise InputError("the driver of the replicas ended; run the same command again") from error
        before, self._decision = self._decision, decision
        if before is None or before.epoch != decision.epoch:
            self._connect()

    def _connect(self) -> None:
        """Connects the processes of this rank in all members. Where that fails, so does the next round."""
        self._group = None
        members, process = self.decision.members, self.process
        if len(members) == 1:
            return
        store = dist.PrefixStore(f"epoch-{self.decision.epoch}-rank-{process.rank}", self._store)
        patience = timedelta(seconds=CONNECT_SECONDS)
        rank = members.index(process.replica)
        self._group = self._try(dist.ProcessGroupGloo, store, rank, len(members), patience)

    def _try(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Result of the work; None where another process is gone."""
        try:
            return work(*arguments)
        except RuntimeError as error:  # gloo's: a connection was closed, or nothing came in time
            self._problem = str(error).split("\n", 1)[0][:300]
            return None

    def _sum_all(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [self._sum(own) for own in values]

    @torch.no_grad()
    def _sum(self, own: Tensor) -> Tensor:
        """Summed in the order of the replicas, so that all have the same bits."""
        count = len(self.decision.members)
        if count == 1:
            return own
        options = AllgatherOptions()
        options.timeout = self.timeout
        total = torch.empty_like(own)
        for start in range(0, len(own), CHUNK_ELEMENTS):
            chunk = own[start : start + CHUNK_ELEMENTS]
            parts = [torch.empty_like(chunk) for _ in range(count)]
            self._connected.allgather([parts], [chunk], options).wait()
            for part in parts[1:]:
                parts[0] += part
            total[start : start + CHUNK_ELEMENTS] = parts[0]
        return total

    @torch.no_grad()
    def _broadcast(self, shards: Sequence[Tensor], rest: bytes, root: int, joins: bool) -> bytes:
        """Fills the shards of joiners with those of the root; returns the root's `rest`. Others receive and drop."""
        length = torch.tensor([len(rest)])
        self._send(length, root)
        payload = torch.zeros(int(length), dtype=torch.uint8)
        if rest:
            payload.copy_(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        self._send(payload, root)
        for shard in shards:
            if shard.numel():
                values = shard.contiguous() if self.leads else torch.empty_like(shard).contiguous()
                self._send(values, root)
                if joins:
                    shard.copy_(values)
        return payload.numpy().tobytes()

    def _send(self, values: Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = root, self.timeout
        self._connected.broadcast([values], options).wait()

    @property
    def _connected(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("not connected")
        return self._group


def data_axis(own: Axis, process: ReplicaProcess) -> Axis:
    """The place among the data ranks of all replicas. own: that in the replica."""
    return Axis(own.size * process.replicas, process.replica * own.size + own.rank)


def left_out_samples(samples: range, members: Sequence[int], replicas: int) -> list[range]:
    """The samples of a step that no member has taken. Of 0 to 11, with replica 1 of 3 lost: 4 to 7."""
    share = len(samples) // replicas
    lost = [replica for replica in range(replicas) if replica not in members]
    return [samples[replica * share : (replica + 1) * share] for replica in lost]
