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

__all__ = ["Change", "Memory", "QueueState", "queue_rows"]


@dataclass(slots=True)
class QueueState:
    """A queue's row.

    Attributes:
        counts: tasks by status, in the order of `STATUS`.
        undelivered: accepted results that some consumer has still to acknowledge.
        max_unfinished: see `spillover.queue.bounds`; None for no bound.
        max_undelivered: likewise.
    """

    id: int
    name: str
    sealed: bool
    positions: int
    counts: list[int]
    undelivered: int = 0
    max_unfinished: int | None = None
    max_undelivered: int | None = None


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
        answered: bytes of all keyed answers that there ever were, forgotten ones too; it only grows.
    """

    lease_seconds: float
    generation: int
    queues: dict[str, QueueState] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    next_number: int = 1
    draining: set[str] = field(default_factory=set)
    answered: int = 0

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
        for queue in queue_rows(cursor, "kind = 'live'"):
            self.queues[queue.name], number = queue, queue.id
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
        query = (
            "SELECT start + LENGTH(digest) + LENGTH(answer) + LENGTH(CAST(key AS BLOB)) FROM answers "
            "ORDER BY id DESC LIMIT 1"
        )
        last = cursor.execute(query).fetchone()
        self.answered = max(self.answered, last[0] if last else 0)


NUMBERED = ("tasks", "consumers", "batches", "queues")


def queue_rows(cursor: sqlite3.Cursor, where: str, *values: object) -> list[QueueState]:
    """The rows of queues for which a condition in SQL holds."""
    columns = ", ".join(STATUS)
    query = (
        f"SELECT undelivered, max_unfinished, max_undelivered, id, name, sealed, positions, {columns} "
        f"FROM queues WHERE {where}"
    )
    return [
        QueueState(number, name, bool(sealed), positions, counts, undelivered, unfinished, most)
        for undelivered, unfinished, most, number, name, sealed, positions, *counts in cursor.execute(
            query, values
        ).fetchall()
    ]


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
            for slot in QueueState.__slots__:
                setattr(queue, slot, getattr(before, slot))

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
            f"UPDATE queues SET sealed = ?, positions = ?, {columns}, undelivered = ?, max_unfinished = ?, "
            "max_undelivered = ?, numbers = ? WHERE id = ?",
            [
                (
                    queue.sealed,
                    queue.positions,
                    *queue.counts,
                    queue.undelivered,
                    queue.max_unfinished,
                    queue.max_undelivered,
                    self.memory.next_number,
                    queue.id,
                )
                for queue in self._dirty.values()
            ],
        )
