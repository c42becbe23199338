"""Durable tasks over a pool: leased, continued, accepted once and accounted for.

>>> import tempfile
>>> from spillover.pool import Pool
>>> with Pool.open(tempfile.mkdtemp(), create=True) as pool, Coordinator(pool) as coordinator:
...     client = Client(coordinator, "work")
...     client.create()
...     _ = client.submit([Task("one", metadata={"n": 1})])
...     (lease,) = client.acquire("me").leases
...     client.complete(lease, metadata={"n": 2}).position
0
"""

from __future__ import annotations

from spillover.queue.client import Client
from spillover.queue.coordinator import LEASE_SECONDS, Coordinator
from spillover.queue.messages import (
    DELIVERY,
    FRESH,
    PARTIAL,
    UNRANKED,
    Acquired,
    Batch,
    CheckpointInfo,
    Completion,
    Consumer,
    Failure,
    Lease,
    Receipt,
    Stats,
    Submitted,
    Task,
    TaskInfo,
    Yielded,
)

__all__ = [
    "DELIVERY",
    "FRESH",
    "LEASE_SECONDS",
    "PARTIAL",
    "UNRANKED",
    "Acquired",
    "Batch",
    "CheckpointInfo",
    "Client",
    "Completion",
    "Consumer",
    "Coordinator",
    "Failure",
    "Lease",
    "Receipt",
    "Stats",
    "Submitted",
    "Task",
    "TaskInfo",
    "Yielded",
]
