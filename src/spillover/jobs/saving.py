"""Saving behind the work's back: at most one save under way, none ever lost or out of order.

The job hands over a function that writes a payload from a snapshot and goes on computing. The next save
waits for the one before, so that pointers move in order and at most one snapshot is in memory. An error
of a save is raised in the job at its next save or `check`, never swallowed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from spillover.state import Owned, Reference

__all__ = ["Saver"]

Write = Callable[[], tuple[Reference, dict[str, Any]]]
"""Writes a payload; returns its reference and what the control object should say of the progress."""


class Saver:
    """Publishes payloads of ``owned`` under ``name``; ``durable`` is told of each, in the saving thread.

    Attributes:
        latest: the newest payload: at first ``basis``, which the work continues from.
    """

    def __init__(
        self, owned: Owned, name: str, basis: Reference | None, durable: Callable[[Reference], None]
    ) -> None:
        self.latest = basis
        self._owned = owned
        self._name = name
        self._durable = durable
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def save(self, write: Write) -> None:
        """Wait for the save before, then begin this one."""
        self.finish()
        self._pending = self._pool.submit(self._publish, write)

    def check(self) -> None:
        """Raise what went wrong in a save that has ended."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Return when everything handed over is durable.

        Raises:
            SpillError: the save failed; what was current before still is.
        """
        self.wait()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def wait(self) -> None:
        """Return when no save is under way, failed or not: `finish` takes no time then."""
        if self._pending is not None:
            futures.wait([self._pending])

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True)

    def _publish(self, write: Write) -> None:
        reference, progress = write()
        self._owned.publish(self._name, reference, progress, basis=self.latest)
        self.latest = reference
        self._durable(reference)
