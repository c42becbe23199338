"""One group of calls on its way into the database: cursor, counters, leases, and how to undo them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from spillover.errors import InputError
from spillover.pool import Ref
from spillover.pool.ledger import Ledger
from spillover.queue.leases import Held, Leases
from spillover.queue.schema import STATUS

__all__ = ["Change", "Memory", "QueueState"]


@dataclass(slots=True)
class QueueState:
    """A queue's row. Counts are by status, in the order of `STATUS`."""

    id: int
    name: str
    sealed: bool
    positions: int
    counts: list[int]


@dataclass
class Memory:
    """What a coordinator keeps in memory between calls; all of it can be read from the database again.

    Attributes:
        queues: by name.
        leases: that are out.
        next_number: for tasks, turns, consumers and batches alike.
        draining: names of queues that hand out nothing for now.
        lease_seconds: how long a lease lasts.
        generation: of the coordinator, its fencing token.
    """

    lease_seconds: float
    generation: int
    queues: dict[str, QueueState] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    next_number: int = 1
    draining: set[str] = field(default_factory=set)

    def queue(self, name: str) -> QueueState:
        """A queue by its name.

        Raises:
            InputError: there is none.
        """
        if (queue := self.queues.get(name)) is None:
            raise InputError(
                f"there is no queue {name!r}", hint="spill queue serve POOL --queue NAME, or Client.create()"
            )
        return queue

    def load(self, cursor: sqlite3.Cursor, now: float) -> None:
        """Read it from the database; every lease gets its full time from ``now`` on."""
        self.queues.clear()
        self.leases = Leases()
        columns = ", ".join(STATUS)
        for number, name, sealed, positions, *counts in cursor.execute(
            f"SELECT id, name, sealed, positions, {columns} FROM queues WHERE kind = 'live'"
        ).fetchall():
            self.queues[name] = QueueState(number, name, bool(sealed), positions, counts)
            query = "SELECT id, attempt, queue, key, worker, input FROM tasks WHERE queue = ? AND status = 1"
            rows = cursor.execute(query, (number,)).fetchall()
            helds = [
                Held(task, attempt, queue, key, worker, Ref.from_bytes(ref) if ref else None)
                for task, attempt, queue, key, worker, ref in rows
            ]
            self.leases.add(helds, now + self.lease_seconds)
        found = [cursor.execute(f"SELECT MAX(id) FROM {table}").fetchone()[0] or 0 for table in NUMBERED]
        ((given,),) = cursor.execute("SELECT COALESCE(MAX(numbers), 0) FROM queues").fetchall()
        self.next_number = max(self.next_number, given, max(found) + 1)


NUMBERED = ("tasks", "consumers", "batches", "queues")


class Change:
    """A transaction in the making.

    Attributes:
        cursor: inside the transaction.
        ledger: ownership.
        memory: changed at once, and put back by `undo`.
        now: of the monotonic clock, seconds.
    """

    def __init__(self, cursor: sqlite3.Cursor, ledger: Ledger, memory: Memory, now: float) -> None:
        self.cursor = cursor
        self.ledger = ledger
        self.memory = memory
        self.now = now
        self._undo: list[Callable[[], object]] = []
        self._dirty: dict[str, QueueState] = {}

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One call: what it changed is undone if it raises, and the others go on."""
        mark = len(self._undo)
        self.cursor.execute("SAVEPOINT call")
        try:
            yield
        except BaseException:
            if self.cursor.connection.in_transaction:
                self.cursor.execute("ROLLBACK TO call")
                self.cursor.execute("RELEASE call")
            self.undo(mark)
            raise
        self.cursor.execute("RELEASE call")

    def undo(self, mark: int = 0) -> None:
        """Put the memory back as it was when ``mark`` steps had been made."""
        while len(self._undo) > mark:
            self._undo.pop()()

    def queue(self, name: str) -> QueueState:
        """A queue to read from.

        Raises:
            InputError: there is none of that name.
        """
        return self.memory.queue(name)

    def changing(self, name: str) -> QueueState:
        """A queue to change."""
        queue = self.queue(name)
        before = replace(queue, counts=[*queue.counts])

        def restore() -> None:
            queue.sealed, queue.positions, queue.counts = before.sealed, before.positions, before.counts

        self._undo.append(restore)
        self._dirty[f"live:{name}"] = queue
        return queue

    def add_queue(self, name: str, kind: str, parent: str | None = None) -> QueueState:
        """Make a queue."""
        queue = QueueState(self.numbers(1), name, False, 0, [0] * len(STATUS))
        self.cursor.execute(
            "INSERT INTO queues(id, name, kind, parent) VALUES(?, ?, ?, ?)", (queue.id, name, kind, parent)
        )
        if kind == "live":
            self.memory.queues[name] = queue
            self._undo.append(lambda: self.memory.queues.pop(name))
        self._dirty[f"{kind}:{name}"] = queue
        return queue

    def numbers(self, count: int) -> int:
        """Reserve ``count`` numbers; returns the first. Numbers of an undone call are not used again."""
        first = self.memory.next_number
        self.memory.next_number += count
        return first

    def lease(self, helds: Sequence[Held]) -> None:
        """Hand tasks out."""
        leases = self.memory.leases
        leases.add(helds, self.now + self.memory.lease_seconds)
        self._undo.append(lambda: leases.remove([held.number for held in helds]))

    def unlease(self, numbers: Iterable[int]) -> None:
        """End leases."""
        leases = self.memory.leases
        removed = leases.remove(numbers)

        def restore() -> None:
            for held, deadline in removed:
                leases.add([held], deadline)

        self._undo.append(restore)

    def flush(self) -> None:
        """Write the rows of changed queues."""
        columns = ", ".join(f"{status} = ?" for status in STATUS)
        self.cursor.executemany(
            f"UPDATE queues SET sealed = ?, positions = ?, {columns}, numbers = ? WHERE id = ?",
            [
                (queue.sealed, queue.positions, *queue.counts, self.memory.next_number, queue.id)
                for queue in self._dirty.values()
            ],
        )
