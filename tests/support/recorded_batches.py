"""Runs gristmill's command line in forks, one a rank, and writes down every training sample that a rank reads.

Reads one JSON line a run from standard input, {"arguments": [...], "processes": 2, "folder": ...}; answers with the
wait statuses of the ranks. FOLDER/rank-0.jsonl and so on get a line a sample: its number, the fingerprint of the
samples, and the SHA-256 of its tokens with the last target."""

import hashlib
import importlib
import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
from warm_launcher import LOADED, leave

from gristmill.data_pipeline.indexed.samples import Samples
from gristmill.pipelines.cli.main import main as gristmill


def digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest()


def record_batches(folder: Path, rank: int) -> None:
    read = Samples.batch

    def batch(self, numbers):
        fields = read(self, numbers)
        rows = np.concatenate([fields["tokens"], fields["targets"][:, -1:]], axis=1)
        with (folder / f"rank-{rank}.jsonl").open("a") as file:
            for number, row in zip(numbers, rows, strict=True):
                line = {"sample": int(number), "samples": self.fingerprint, "sha256": digest(row)}
                file.write(json.dumps(line) + "\n")
        return fields

    Samples.batch = batch


def start(order: dict, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    folder = Path(order["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if order["processes"] > 1:
        world = str(order["processes"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    record_batches(folder, rank)
    sys.argv = ["gristmill", *order["arguments"]]
    leave(gristmill)
    raise AssertionError("not reached")


def main() -> None:
    for module in LOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [start(order, rank, port) for rank in range(order["processes"])]
        print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
