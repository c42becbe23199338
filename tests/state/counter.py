"""The smallest job there is: a sum whose every step is saved."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from faults import WorkStore
from spillover.state import State
from spillover.store import Store

STEPS = 3
IDENTITY = {"work": "counter", "steps": STEPS}
TOTAL = 31**2 * 1 + 31 * 2 + 3
PATIENCE = 60.0


def run(
    store: Store,
    log: Path,
    lease: float = 0.4,
    takeover: bool = False,
    pace: Callable[[int], None] = lambda step: None,
) -> None:
    """Count to `STEPS`, or continue to; append each step that is reported durable to ``log``."""
    state = State(store, lease_seconds=lease)
    document = state.read()
    if document is not None and document.status == "completed":
        return
    with state.acquire(IDENTITY, takeover=takeover) as owned:
        step, total = 0, 0
        current = owned.document.current.get("ckpt")
        if current is not None:
            step, total = json.loads(owned.open(current).read("state.json"))
        while step < STEPS:
            owned.check()
            pace(step)
            step, total = step + 1, total * 31 + step + 1
            writer = owned.payload("ckpt", f"step-{step:09d}")
            writer.add("state.json", json.dumps([step, total]).encode())
            writer.add("params", lambda: [b"x" * 1000, b"y" * 500])
            current = writer.commit(step=step)
            owned.publish("ckpt", current, {"step": step, "total": total})
            report(log, step)
        owned.complete({"total": total})
        report(log, STEPS)


def run_renewed(store: WorkStore, log: Path, takeover: bool = False) -> None:
    """The same, and each step waits until its lease was renewed once more."""

    def pace(step: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(store.renewals.calls) <= step:
            assert time.monotonic() < end, "the lease is not renewed"
            time.sleep(0.01)

    run(store, log, lease=0.15, takeover=takeover, pace=pace)


def report(log: Path, step: int) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{step}\n".encode())
    os.close(file)
