"""A limit on processor time for code that may take for ever, such as a regular expression that backtracks.

Python's matcher looks for signals every few thousand steps, so a timer of this process's own time ends it.
Signals reach the main thread alone: outside of it there is no limit.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["TooSlow", "time_limit"]


class TooSlow(Exception):
    """Raised where the time was up."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the body once it has used this many seconds of processor time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _up)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _up(number: int, frame: FrameType | None) -> None:
    raise TooSlow
