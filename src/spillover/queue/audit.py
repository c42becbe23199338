"""Checking a whole queue: that its tables agree with each other, and its payloads are there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import msgspec

from spillover.errors import SpillError
from spillover.pool import Reader, Ref
from spillover.queue.change import QueueState, queue_rows
from spillover.queue.checkpoints import OWNED
from spillover.queue.coordinator import Coordinator
from spillover.queue.schema import STATUS, owner

__all__ = ["Audit", "audit"]

PAGE = 10_000


class Audit(msgspec.Struct, frozen=True):
    """What a check found.

    Attributes:
        queues: queues and checkpoints checked.
        tasks: tasks in them.
        payloads: references whose publication was looked at.
        problems: what is wrong, a line each.
    """

    queues: int
    tasks: int
    payloads: int
    problems: list[str]


def audit(coordinator: Coordinator, progress: Callable[[int, int], None] = lambda done, total: None) -> Audit:
    """Check every queue and checkpoint. Calls wait meanwhile only for a page of rows at a time.

    Args:
        progress: told of payloads looked at and payloads in all.
    """
    catalogue = coordinator.owners.catalogue
    problems: list[str] = []
    with catalogue.reading() as cursor:
        problems += [
            f"database: {line}" for (line,) in cursor.execute("PRAGMA integrity_check") if line != "ok"
        ]
        queues = queue_rows(cursor, "TRUE")
        for queue in queues:
            problems += [f"queue {queue.name!r}: {line}" for line in _tables(cursor, queue)]
        ((tasks,),) = cursor.execute("SELECT COUNT(*) FROM tasks").fetchall()
        total = sum(
            cursor.execute(f"SELECT COUNT(*) FROM ({query})", (queue.id,)).fetchone()[0]
            for queue in queues
            for _, query in OWNED
        )
    done = 0
    with Reader(coordinator.owners.folder) as reader:
        for queue in queues:
            for kind, query in OWNED:
                for number, ref in _pages(coordinator, query, queue.id):
                    problems += _payload(coordinator, reader, owner(kind, number), ref, queue.name)
                    done += 1
                    progress(done, total)
    return Audit(len(queues), tasks, done, problems)


def _tables(cursor: sqlite3.Cursor, queue: QueueState) -> Iterator[str]:
    """What does not agree within one queue."""
    counts = [0] * len(STATUS)
    for status, count in cursor.execute(
        "SELECT status, COUNT(*) FROM tasks WHERE queue = ? GROUP BY status", (queue.id,)
    ):
        counts[status] = count
    for name, kept, counted in zip(STATUS, queue.counts, counts, strict=True):
        if kept != counted:
            yield f"{counted} tasks are {name}, the count says {kept}"
    query = "SELECT COUNT(*), MIN(position), MAX(position) FROM accepted WHERE queue = ?"
    count, first, last = cursor.execute(query, (queue.id,)).fetchone()
    if count and last >= queue.positions:  # holes are fine: a restored or trimmed log has them
        yield f"positions {first} to {last} hold {count} results, but the next one is {queue.positions}"
    query = "SELECT COUNT(*) FROM accepted WHERE queue = ? AND held = 1"
    ((held,),) = cursor.execute(query, (queue.id,)).fetchall()
    if held != queue.undelivered:
        yield f"{held} results are not delivered, the count says {queue.undelivered}"
    query = (
        "SELECT COUNT(*) FROM tasks LEFT JOIN accepted AS a ON a.queue = tasks.queue "
        "AND a.position = tasks.position AND a.task = tasks.id "
        "WHERE tasks.queue = ? AND status = 2 AND a.position IS NULL"
    )
    ((lost,),) = cursor.execute(query, (queue.id,)).fetchall()
    if lost:
        yield f"{lost} completed tasks have no accepted result"


def _pages(coordinator: Coordinator, query: str, queue: int) -> Iterator[tuple[int, Ref]]:
    offset = 0
    while True:
        with coordinator.owners.catalogue.reading() as cursor:
            rows = cursor.execute(f"{query} LIMIT {PAGE} OFFSET {offset}", (queue,)).fetchall()
        yield from ((number, Ref.from_bytes(ref)) for number, ref in rows)
        if len(rows) < PAGE:
            return
        offset += PAGE


def _payload(coordinator: Coordinator, reader: Reader, key: int, ref: Ref, queue: str) -> Iterator[str]:
    """What is wrong with one payload: not owned, or not readable."""
    catalogue = coordinator.owners.catalogue
    try:
        pack, place = reader.place(ref, catalogue.ledger.gone)
        reader.index(ref)
    except SpillError as error:
        yield f"queue {queue!r}: {error}"
        return
    with catalogue.reading() as cursor:
        query = "SELECT 1 FROM owned WHERE pack = ? AND place = ? AND owner IN (?, ?)"
        if cursor.execute(query, (pack, place, key, -key)).fetchone() is None:
            yield f"queue {queue!r}: nobody owns {ref}"
