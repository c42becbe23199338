"""Several workers, a store that loses and delays answers, clocks that jump: checked against history."""

from __future__ import annotations

import json
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from spillover.errors import NotAllowed, StoreError, Superseded
from spillover.state import Control, Owned, State
from spillover.state import control as transitions
from spillover.store import Fault, FaultyStore, MemoryStore

IDENTITY = {"work": "simulation"}
WORKERS = st.integers(0, 2)
TROUBLE = st.sampled_from([None, "before", "after", "late", "twice"])


class History(MemoryStore):
    """Remembers every control object that was ever installed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: list[Control] = []

    def _put(self, key: str, data: bytes) -> str:
        if key == "control.json":
            self.documents.append(transitions.decode(data, key))
        return super()._put(key, data)


class Flaky(FaultyStore):
    """Deals one fault to the next conditional replace, the call that everything hangs on."""

    trouble: str | None = None

    def replace(self, key: str, data: bytes, version: str) -> str:
        if self.trouble is not None:
            self.fault, self.trouble = Fault(len(self.calls) + 1, self.trouble), None  # type: ignore[arg-type]
        return super().replace(key, data, version)


class Workers(RuleBasedStateMachine):
    """Each worker has its own faulty way to one shared store."""

    @initialize()
    def begin(self) -> None:
        self.history = History()
        self.stores = [Flaky(self.history) for _ in range(4)]
        self.owned: dict[int, Owned] = {}
        self.reported: list[tuple[int, int]] = []  # generation, step of publications that returned
        self.started: dict[tuple[int, int], int] = {}
        self.steps = 0
        self.clock = time.time
        self.shift = 0.0

    @rule(worker=WORKERS, trouble=TROUBLE)
    def acquire(self, worker: int, trouble: str | None) -> None:
        self.crash(worker)
        self.stores[worker].trouble = trouble
        try:
            self.owned[worker] = State(self.stores[worker], lease_seconds=3600).acquire(
                IDENTITY, takeover=True
            )
        except (StoreError, NotAllowed):
            return

    @precondition(lambda self: self.owned)
    @rule(worker=WORKERS, trouble=TROUBLE)
    def publish(self, worker: int, trouble: str | None) -> None:
        if (owned := self.owned.get(worker)) is None:
            return
        self.stores[worker].trouble = trouble
        self.steps += 1
        try:
            writer = owned.payload("ckpt", f"step-{self.steps:09d}")
            writer.add("state.json", json.dumps(self.steps).encode())
            reference = writer.commit(step=self.steps)
            owned.publish("ckpt", reference, {"step": self.steps})
        except Superseded:
            assert self.history.documents[-1].generation > owned.generation
            self.crash(worker)
        except StoreError:
            return
        else:
            self.reported.append((owned.generation, self.steps))

    @rule(worker=WORKERS)
    def renew(self, worker: int) -> None:
        if worker in self.owned:
            try:
                self.owned[worker]._renew()
            except (Superseded, StoreError):
                return

    @rule(worker=WORKERS)
    def crash(self, worker: int) -> None:
        if (owned := self.owned.pop(worker, None)) is not None:
            owned._over.set()  # its renewals stop; nothing is released

    @rule(worker=WORKERS)
    def release(self, worker: int) -> None:
        if (owned := self.owned.pop(worker, None)) is not None:
            owned.release()

    @rule(hours=st.floats(-48, 48))
    def clock_jumps(self, hours: float) -> None:
        self.shift += hours * 3600
        transitions.time.time = lambda: self.clock() + self.shift  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if not hasattr(self, "history"):
            return
        transitions.time.time = self.clock  # type: ignore[attr-defined]
        for owned in self.owned.values():
            owned._over.set()
        check(self.history, self.reported)


def check(history: History, reported: list[tuple[int, int]]) -> None:
    """I1 to I4, read off the documents in the order in which they were installed."""
    publishers: dict[int, set[str]] = {}
    for before, after in zip(history.documents, history.documents[1:], strict=False):
        event = after.history[-1]
        assert after.revision == before.revision + 1
        assert after.generation == before.generation + (event.transition == "acquire")
        assert after.sequence >= before.sequence
        if event.transition.startswith("publish"):
            assert after.owner == before.owner is not None
            publishers.setdefault(after.generation, set()).add(after.owner.id)
            assert after.current["ckpt"].generation == after.generation
            assert after.current["ckpt"].sequence > before.sequence
    assert all(len(ids) == 1 for ids in publishers.values())
    published = {(d.generation, d.current["ckpt"].step) for d in history.documents if "ckpt" in d.current}
    assert set(reported) <= published, "a publication that returned never became current"
    if history.documents and history.documents[-1].current:
        state = State(history)
        newest = history.documents[-1]
        for reference in (*newest.current.values(), *newest.previous.values()):
            state.open(reference).verify()


Workers.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWorkers = Workers.TestCase
