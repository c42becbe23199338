"""One queue, called ``work``, whose time the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from queued import Place
from spillover.queue import Client


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Afterwards everything is accounted for."""
    with Place(tmp_path / "pool") as place:
        yield place
        place.account()


@pytest.fixture
def client(place: Place) -> Client:
    return place.client
