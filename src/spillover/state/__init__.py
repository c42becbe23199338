"""Durable state with one fenced owner.

>>> from spillover.store import open_store
>>> state = State(open_store("memory://example-state"))
>>> with state.acquire({"work": "an example"}) as owned:
...     writer = owned.payload("ckpt", "step-000000001")
...     writer.add("weights", b"...")
...     owned.publish("ckpt", writer.commit(step=1), {"step": 1})
>>> state.read().current["ckpt"].step
1
"""

from __future__ import annotations

from spillover.state.control import Control, Event, Identity, Owner, Quiesce, Reference, Status
from spillover.state.ownership import LEASE_SECONDS, Owned, State
from spillover.state.payload import Commit, Payload, PayloadWriter

__all__ = [
    "LEASE_SECONDS",
    "Commit",
    "Control",
    "Event",
    "Identity",
    "Owned",
    "Owner",
    "Payload",
    "PayloadWriter",
    "Quiesce",
    "Reference",
    "State",
    "Status",
]
