"""How much a queue may hold: backpressure on those who submit, and on those who lease.

Two bounds, each a column of the queue's row, so that they outlive the coordinator:

- ``max_unfinished``: tasks pending or leased. A submission beyond it is refused whole, with `Full`, and the
  producer's cursor stays. A repeat of what was submitted before adds nothing, and is answered.
- ``max_undelivered``: accepted results that some consumer has still to acknowledge (all, while there is no
  consumer), and leases, each of which may become one. Beyond it nothing is handed out: the answer to
  `Acquire` says ``backpressured``.

Only what adds work is refused. A result that was worked for is always accepted, a yielded or failed task
always returns, and whoever retries, forks or restores may pass a bound; then nothing is added until there is
room again. The bytes of payloads have a bound of their own: the pool's (`spillover.pool.quota`).
"""

from __future__ import annotations

from spillover.errors import Full, InputError
from spillover.queue import messages as m
from spillover.queue.change import Change, QueueState
from spillover.queue.schema import LEASED, PENDING

__all__ = ["limit", "require_room", "room_to_lease"]


def limit(change: Change, call: m.Limit) -> None:
    """Set both bounds of a queue. What is there already stays.

    Raises:
        InputError: a bound is below one, or larger than a column holds.
    """
    for bound in (call.unfinished, call.undelivered):
        if bound is not None and not 1 <= bound < 1 << 63:
            raise InputError(f"a queue cannot be bounded at {bound}", hint="at least 1, or None for no bound")
    queue = change.changing(call.queue)
    queue.max_unfinished, queue.max_undelivered = call.unfinished, call.undelivered


def require_room(queue: QueueState, added: int) -> None:
    """Return if a queue may take so many more tasks.

    Raises:
        Full: not now.
        InputError: never.
    """
    most = queue.max_unfinished
    held = queue.counts[PENDING] + queue.counts[LEASED]
    if most is None or not added or held + added <= most:
        return
    if added > most:
        raise InputError(
            f"queue {queue.name!r} may have {most} unfinished tasks: {added} new ones never fit",
            hint="submit fewer at once",
        )
    raise Full(
        f"queue {queue.name!r} is full: it has {held} unfinished tasks and may have {most}, "
        f"so {added} more do not fit",
        hint="try again when some are finished; Client.submit(..., wait=SECONDS) does",
    )


def room_to_lease(queue: QueueState, wanted: int) -> int:
    """How many of ``wanted`` tasks may be handed out now, so that all of their results have room."""
    if queue.max_undelivered is None:
        return wanted
    return max(0, min(wanted, queue.max_undelivered - queue.undelivered - queue.counts[LEASED]))
