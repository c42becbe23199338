"""Calls on their way to a coordinator, bounded in number and in bytes.

Guarantee: at most so many calls wait for their answers, with so many bytes, however many clients there are;
one more is refused with `Busy` at once and changes nothing. A call that waits holds a thread or a connection
and its bytes; without bounds a flood of them ends the coordinator, and with it everybody's. The bytes of a
small call are not refused, so that large ones that arrive slowly keep nobody else out.
"""

from __future__ import annotations

import threading

from spillover.errors import Busy

__all__ = ["MAX_WAITING", "MAX_WAITING_BYTES", "Entry", "Inbox"]

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
SMALL = 64 << 10
"""Bytes of a call that come in even where there is no room; a connection may buffer as many anyway."""


class Inbox:
    """What waits for one coordinator. Threads may share it.

    Args:
        max_calls: most calls that may wait, those being answered included.
        max_bytes: most bytes that they may have together, as encoded, before large ones are refused.

    Attributes:
        calls: waiting now.
        bytes: of them, and of those that are still arriving.
        refused: how many were, so far.
    """

    def __init__(self, max_calls: int = MAX_WAITING, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.calls = self.bytes = self.refused = 0
        self._lock = threading.Lock()

    def entry(self) -> Entry:
        """The place of one caller, empty at first."""
        return Entry(self)

    def _add(self, calls: int, size: int, large: bool) -> None:
        with self._lock:
            crowded = self.calls + calls > self.max_calls
            if not crowded and not (large and self.bytes + size > self.max_bytes):
                self.calls += calls
                self.bytes += size
                return
            self.refused += 1
            waiting = f"{self.calls} calls wait" if crowded else f"calls of {self.bytes} bytes wait"
        most = self.max_calls if crowded else self.max_bytes
        raise Busy(f"the coordinator is busy: {waiting}, and {most} may", hint="try again in a moment")

    def _remove(self, calls: int, size: int) -> None:
        with self._lock:
            self.calls -= calls
            self.bytes -= size


class Entry:
    """What one caller has in an `Inbox`. A context manager: leaving it takes everything out again."""

    __slots__ = ("_inbox", "calls", "size")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.calls = self.size = 0

    def add(self, *, calls: int = 0, size: int = 0) -> None:
        """Put in calls, or bytes of them.

        Raises:
            Busy: there is no room.
        """
        self._inbox._add(calls, size, size > 0 and self.size + size > SMALL)
        self.calls += calls
        self.size += size

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *exc: object) -> None:
        self._inbox._remove(self.calls, self.size)
        self.calls = self.size = 0
