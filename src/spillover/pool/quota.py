"""The pool's limit, as one writer sees it.

A writer counts what it adds and looks at the folder again before it refuses, at every new pack, and after
it has added a sixty-fourth of the limit. Between two looks it does not see what others add, so that
together they may pass the limit by that much each. What writers have zeroed ahead of their packs counts,
since it takes room on the disk; that is at most a 1024th of the limit for each.
"""

from __future__ import annotations

import threading

from spillover.errors import StoreFull
from spillover.pool.folder import Folder

__all__ = ["Quota", "Unlimited"]


class Quota:
    """Room under the limit of ``folder``. Threads may share it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._used = 0
        self._added = 0
        self._lock = threading.Lock()
        self.refresh()

    def require(self, size: int) -> None:
        """Return if ``size`` more bytes have room.

        Raises:
            StoreFull: they have not.
        """
        with self._lock:
            limit = self._folder.identity.max_bytes
            if limit is None:
                return
            if self._added > limit // 64 or self._used + self._added + size > limit:
                self._look()
                limit = self._folder.identity.max_bytes
            full = limit is not None and self._used + self._added + size > limit
        if full:
            raise StoreFull(
                f"{self._folder.path} holds {self._used:,} of its {limit:,} bytes, {size:,} more do not fit",
                hint=f"release owners and run: spill pool gc {self._folder.path}",
            )

    def spare(self, size: int, beside: int) -> int:
        """How many of ``size`` bytes may be taken before they are needed, along with ``beside`` that are."""
        with self._lock:
            limit = self._folder.identity.max_bytes
            if limit is None:
                return size
            return max(0, min(size, limit // 1024, limit - self._used - self._added - beside))

    def add(self, size: int) -> None:
        """Count what was written."""
        with self._lock:
            self._added += size

    def refresh(self) -> None:
        """Look at the folder and its limit again."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._folder.reload()
        self._used = self._folder.used() if self._folder.identity.max_bytes is not None else 0
        self._added = 0


class Unlimited(Quota):
    """Room for what will give back more than it takes."""

    def require(self, size: int) -> None:
        """There is always room here; the disk has the last word."""
