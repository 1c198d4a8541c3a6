"""An S3 server of moto on the loopback device, which the libraries find by their environment variables."""

from collections.abc import Iterator
from contextlib import contextmanager
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
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield boto3.client("s3")
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
