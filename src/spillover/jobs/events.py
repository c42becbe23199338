"""What a job says while it works: one flat JSON object an event.

Every event has ``event``, ``time`` (Unix seconds), ``command``, ``step``, ``loss``, ``tokens_per_s``,
``peak_mem_gb``, ``eta_s`` and ``engine``, null where they do not apply, and whatever else its kind says:

==============  ============================================================================
``start``       ``message`` (the line before the work), ``run``, ``state``, ``total``,
                ``host``, ``hardware``, ``device``, ``numerics``
``restore``     ``uri`` and ``step`` that the work continues from
``step``        one optimizer step: ``lr``, ``grad_norm``, ``tokens`` (targets), ``step_s``, ``rows``,
                ``bound`` (what holds the work back most) and ``share`` (of it, reached)
``row``         one finished row: ``custom_id``, ``total``, ``finish``, ``bound``, ``share``
``checkpoint``  ``uri``: what was reported before this is durable
``stage``       a named part of the work: ``stage``, ``message``
``preempted``   ``signal``, ``run``, ``message``; the process exits 75
``done``        ``complete``, ``seconds``, ``run``, ``message``
``error``       ``message``, ``hint``
==============  ============================================================================
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Event", "Events", "Kind", "Sink", "peak_memory"]

Kind: TypeAlias = Literal[
    "start", "restore", "step", "row", "checkpoint", "stage", "preempted", "done", "error"
]
Event: TypeAlias = dict[str, Any]
Sink: TypeAlias = Callable[[Event], None]

COMMON = ("step", "loss", "tokens_per_s", "peak_mem_gb", "eta_s", "engine")


class Events:
    """Sends each event to every sink, in order. ``engine`` is set once it is known."""

    def __init__(self, command: str, *sinks: Sink) -> None:
        self.command = command
        self.engine: str | None = None
        self._sinks = [*sinks]
        self._started = time.monotonic()
        self._order = threading.Lock()  # saves are told from a thread of their own

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return round(time.monotonic() - self._started, 3)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def emit(self, kind: Kind, **fields: Any) -> None:
        event: Event = {"event": kind, "time": round(time.time(), 3), "command": self.command}
        event |= dict.fromkeys(COMMON)
        event |= {"peak_mem_gb": round(peak_memory() / 1e9, 3), "engine": self.engine}
        event |= fields
        with self._order:
            for sink in self._sinks:
                sink(event)


def peak_memory() -> int:
    """The most bytes that this process ever had resident."""
    with contextlib.suppress(OSError):  # what getrusage says counts the process that started this one, too
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
