"""A pool with a coordinator whose clock the test moves, and what must always be true of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillover.pool import Pool, Record, Ref
from spillover.queue import Client, Coordinator, Lease
from spillover.queue.change import queue_rows
from spillover.queue.checkpoints import OWNED
from spillover.queue.schema import STATUS, owner

SECONDS = 10.0
"""How long a lease lasts here."""


class Clock:
    """Monotonic time, as the test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Place:
    """A pool and its coordinator, in this process. A context manager.

    Args:
        options: of the pool.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.clock = folder, Clock()
        self.pool = Pool.open(folder, create=True, **options)
        self.open()

    def open(self) -> None:
        self.coordinator = Coordinator(self.pool, lease_seconds=SECONDS, clock=self.clock)
        self.client = Client(self.coordinator, "work")
        self.client.create()

    def restart(self) -> None:
        """As a new process would: with a clock that began somewhere else."""
        self.coordinator.close()
        self.clock.now = 5.0
        self.open()

    def publish(self, text: str, *dependencies: Ref) -> Ref:
        return self.pool.publish([Record("text", text.encode())], dependencies=dependencies)

    def read(self, ref: Ref) -> str:
        payload = self.pool.read(ref)["text"].payload
        assert isinstance(payload, bytes)
        return payload.decode()

    def lease(self, worker: str = "worker", **options: Any) -> Lease:
        (lease,) = self.client.acquire(worker, **options).leases
        return lease

    def owned(self) -> set[tuple[int, int, int]]:
        """What rows of queues own: pack, place and owner."""
        with self.coordinator.owners.catalogue.reading() as cursor:
            query = "SELECT pack, place, ABS(owner) FROM owned WHERE ABS(owner) >= ?"
            return {*cursor.execute(query, (owner(0, 0),))}

    def account(self) -> None:
        """The counts, the memory and the ownership are what the rows say."""
        memory = self.coordinator._memory
        ledger = self.coordinator.owners.catalogue.ledger
        wanted: set[tuple[int, int, int]] = set()
        with self.coordinator.owners.catalogue.reading() as cursor:
            kinds = dict(cursor.execute("SELECT id, kind FROM queues").fetchall())
            for written in queue_rows(cursor, "TRUE"):
                number, name, counts = written.id, written.name, written.counts
                query = "SELECT status FROM tasks WHERE queue = ?"
                found = [status for (status,) in cursor.execute(query, (number,))]
                assert counts == [found.count(status) for status in range(len(STATUS))], name
                query = "SELECT COUNT(*) FROM accepted WHERE queue = ? AND held = 1"
                assert cursor.execute(query, (number,)).fetchone() == (written.undelivered,), name
                if kinds[number] == "live":
                    assert memory.queues[name] == written
                for what, query in OWNED:
                    for row, ref in cursor.execute(query, (number,)).fetchall():
                        for pack, place, _ in ledger.closure(Ref.from_bytes(ref)):
                            wanted.add((pack, place, owner(what, row)))
            rows = cursor.execute("SELECT id, attempt, queue, key, worker FROM tasks WHERE status = 1")
            leased = {*rows.fetchall()}
        held = memory.leases.all()
        assert {(one.number, one.attempt, one.queue, one.key, one.worker) for one in held} == leased
        assert self.owned() == wanted

    def close(self) -> None:
        self.coordinator.close()
        self.pool.close()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
