"""Fixtures that several parts use: a real S3 endpoint over HTTP, and throw-away homes."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import hypothesis
import pytest
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server

pytest_plugins = ["pool.gluster"]
BUCKET = "spill-tests"
# how long an example takes says more of the machine than of the code
hypothesis.settings.register_profile("spillover", deadline=None)
hypothesis.settings.load_profile("spillover")
logging.getLogger("werkzeug").setLevel(logging.ERROR)


class OneAtATime:
    """Serves one request at a time: moto looks and then stores, S3 does both in one step."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> list[bytes]:
        with self._lock:
            return [*self._app(environ, start_response)]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 server on this machine, with the bucket `BUCKET`."""
    app = OneAtATime(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield endpoint
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A function that returns a new ``s3://`` URI, reachable from here and from child processes."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return lambda: f"s3://{BUCKET}/{secrets.token_hex(6)}"


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder whose syncs cost nothing: a killed process leaves the same behind on any filesystem."""
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(params=["local", "s3"])
def durable_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that survives a process: a folder, then an S3 prefix."""
    if request.param == "local":
        return str(tmp_path / "state")
    return request.getfixturevalue("s3")()


@pytest.fixture(params=["local", "s3"])
def quick_uri(request: pytest.FixtureRequest) -> str:
    """The same for hundreds of runs: a folder without a disk, then an S3 prefix."""
    if request.param == "local":
        return str(request.getfixturevalue("memory") / "state")
    return request.getfixturevalue("s3")()
