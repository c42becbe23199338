"""A coordinator in waiting.

Guarantee: a live coordinator is never replaced. Whoever waits tries to own the pool, which succeeds only once
the lock of the former owner is free, and the kernel (or the servers of a shared mount) frees that when the
process dies. Where a store had no locks, trying would itself watch the owner for a lease; see
`spillover.state.ownership`.
"""

from __future__ import annotations

import threading
import time

from spillover.errors import LockContended, StoreError, StoreRefused
from spillover.pool import Pool
from spillover.queue.coordinator import LEASE_SECONDS, Coordinator
from spillover.queue.inbox import MAX_WAITING

__all__ = ["standby"]

LOOK_SECONDS = 0.25
TROUBLE_SECONDS = 60.0
"""How long in a row the store may fail before waiting is given up."""


def standby(
    pool: Pool,
    *,
    lease_seconds: float = LEASE_SECONDS,
    timeout: float | None = None,
    stop: threading.Event | None = None,
    max_waiting: int = MAX_WAITING,
) -> Coordinator:
    """Wait until nobody coordinates ``pool`` any more, then coordinate it.

    Args:
        lease_seconds: as for `Coordinator`.
        timeout: most seconds to wait; None waits for ever.
        stop: ends the wait when it is set.
        max_waiting: as for `Coordinator`.

    Raises:
        LockContended: another process still coordinates it when the time is up or ``stop`` is set.
        StoreError: the pool's folder failed for a minute.
    """
    stop = stop or threading.Event()
    end = None if timeout is None else time.monotonic() + timeout
    well = time.monotonic()
    while True:
        try:
            return Coordinator(pool, lease_seconds=lease_seconds, max_waiting=max_waiting)
        except LockContended:
            well = time.monotonic()
            if end is not None and well + LOOK_SECONDS > end:
                raise
            if stop.wait(LOOK_SECONDS):
                raise
        except StoreRefused:
            raise
        except StoreError:  # a shared mount may be away for a while
            if stop.wait(LOOK_SECONDS) or time.monotonic() - well > TROUBLE_SECONDS:
                raise
