"""A coordinator in a Ray actor: ``pip install "spillover[ray]"``.

>>> actor = start("pool", name="coordinator")  # doctest: +SKIP
>>> client = Client(actor, "work")  # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillover.errors import EngineError
from spillover.pool import Pool
from spillover.queue.coordinator import LEASE_SECONDS, Coordinator
from spillover.queue.inbox import MAX_WAITING
from spillover.queue.transport import answer_wire

__all__ = ["start"]

CONCURRENT = 64
"""Calls that are worked on at once; they share commits."""


class Host:
    """What runs in the actor's process. Its calls run in threads and share commits."""

    def __init__(self, path: str, lease_seconds: float) -> None:
        self._pool = Pool.open(path, create=True)
        self._coordinator = Coordinator(self._pool, lease_seconds=lease_seconds)

    def call(self, body: bytes) -> tuple[bool, bytes]:
        """Do an encoded call; see `answer_wire`."""
        return answer_wire(self._coordinator, body)

    def generation(self) -> int:
        """The coordinator's fencing token."""
        return self._coordinator.owners.generation


def start(
    pool: str | Path,
    *,
    name: str = "spill-coordinator",
    namespace: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    restarts: int = -1,
) -> Any:
    """Start a coordinator as a named, detached actor, or find it. It restarts by itself when it dies.

    Args:
        pool: the pool's folder, the same on every node.
        restarts: how often Ray may restart it; -1 for any number.

    Raises:
        EngineError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise EngineError("Ray is not installed", hint='pip install "spillover[ray]"') from None
    actor = ray.remote(Host).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=CONCURRENT,
        max_pending_calls=MAX_WAITING,
        max_restarts=restarts,
    )
    return actor.remote(str(Path(pool).absolute()), lease_seconds)
