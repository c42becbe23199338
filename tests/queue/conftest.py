"""One queue, called ``work``: in this process, where the test moves its time, and behind a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queued import Place
from serving import Server, serving
from spillover.queue import Client, Task
from wire import SOON, TOKEN


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Afterwards everything is accounted for."""
    with Place(tmp_path / "pool") as place:
        yield place
        place.account()


@pytest.fixture
def client(place: Place) -> Client:
    return place.client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "pool", token=TOKEN) as server:
        with Client(server.address, "work", token=TOKEN) as client:
            client.create()
        yield server


@pytest.fixture
def goes_on(server: Server) -> Iterator[None]:
    """Whatever a test did, a good call is answered afterwards, and soon."""
    yield
    begun = time.monotonic()
    with Client(server.address, "work", token=TOKEN, timeout=SOON) as client:
        client.submit([Task(f"after {begun}")])
    assert server.process.poll() is None
    assert time.monotonic() - begun < SOON
