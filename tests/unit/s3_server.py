"""A real S3 server on loopback: that of moto, where it is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_MISSING = [n for n in ("moto", "s3fs", "boto3", "flask") if importlib.util.find_spec(n) is None]
NEEDED = pytest.mark.skipif(
    bool(_MISSING),
    reason=f"{', '.join(_MISSING)} not installed; pip install -r requirements/store.txt",
)
BUCKET = "checkpoints"


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """The variables by which programs find it, and a bucket in it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    env = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        client(env).create_bucket(Bucket=BUCKET)
        yield env
    finally:
        server.stop()


def client(env: dict[str, str]) -> Any:
    """Makes a client of boto3, independent of the code under test."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_DEFAULT_REGION"],
    )
