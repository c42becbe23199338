"""What can be looked at without changing anything."""

from __future__ import annotations

import sqlite3
from typing import Any

from spillover.errors import InputError
from spillover.queue import consumers
from spillover.queue import messages as m
from spillover.queue.change import Memory, QueueState
from spillover.queue.schema import LEASED, PENDING, STATUS
from spillover.queue.tasks import loaded, unpacked

__all__ = ["batch", "checkpoints", "consumer", "log", "producer", "stats", "task", "task_list"]

PAGE = 100_000
"""The longest page of tasks or receipts: an answer is made in memory."""
_COLUMNS = (
    "id, key, status, lane, stage, rank, attempt, failures, max_attempts, "
    "position, input, metadata, worker, failure"
)


def stats(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadStats) -> m.Stats:
    """Counts, without going through the tasks."""
    counts = dict(zip(STATUS, queue.counts, strict=True))
    end = queue.sealed and not queue.counts[PENDING] and not queue.counts[LEASED]
    return m.Stats(
        queue=queue.name,
        **counts,
        positions=queue.positions,
        undelivered=queue.undelivered,
        max_unfinished=queue.max_unfinished,
        max_undelivered=queue.max_undelivered,
        sealed=queue.sealed,
        draining=queue.name in memory.draining,
        end=end,
        generation=memory.generation,
    )


def task(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadTask) -> m.TaskInfo | None:
    """One task by its id."""
    sql = f"SELECT {_COLUMNS} FROM tasks WHERE queue = ? AND key = ?"
    row = cursor.execute(sql, (queue.id, query.task)).fetchone()
    return None if row is None else _info(row)


def task_list(
    cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ListTasks
) -> list[m.TaskInfo]:
    """A page of tasks; the next one begins after the last one's number."""
    where, values = "queue = ? AND id > ?", [queue.id, query.after]
    if query.status is not None:
        if query.status not in STATUS:
            raise InputError(f"there is no status {query.status!r}", hint=f"one of {', '.join(STATUS)}")
        where += f" AND status = {STATUS.index(query.status)}"  # a literal, for the partial indexes
    sql = f"SELECT {_COLUMNS} FROM tasks WHERE {where} ORDER BY id LIMIT ?"
    return [_info(row) for row in cursor.execute(sql, (*values, _page(query.limit))).fetchall()]


def log(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadLog) -> list[m.Receipt]:
    """Accepted results in order."""
    return consumers.read_log(cursor, queue, query.start, _page(query.limit))


def consumer(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadConsumer) -> m.Consumer:
    """Where a consumer is."""
    return consumers.read_consumer(cursor, queue, query.consumer)


def batch(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadBatch) -> m.Batch:
    """A batch."""
    return consumers.read_batch(cursor, queue, query.batch)


def producer(cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadProducer) -> Any:
    """A producer's cursor."""
    sql = "SELECT cursor FROM producers WHERE queue = ? AND name = ?"
    row = cursor.execute(sql, (queue.id, query.producer)).fetchone()
    return None if row is None else loaded(row[0])


def checkpoints(
    cursor: sqlite3.Cursor, memory: Memory, queue: QueueState, query: m.ReadCheckpoints
) -> list[m.CheckpointInfo]:
    """The checkpoints of a queue, oldest first."""
    sql = (
        "SELECT name, pending, dead, completed FROM queues "
        "WHERE kind = 'checkpoint' AND parent = ? ORDER BY id"
    )
    return [
        m.CheckpointInfo(name, queue.name, pending + dead, completed)
        for name, pending, dead, completed in cursor.execute(sql, (queue.name,)).fetchall()
    ]


def _page(limit: int) -> int:
    """The size of a page, if it may be asked for.

    Raises:
        InputError: it may not.
    """
    if not 1 <= limit <= PAGE:
        raise InputError(f"a page of {limit} is asked for", hint=f"from 1 to {PAGE}")
    return limit


def _info(row: tuple[Any, ...]) -> m.TaskInfo:
    number, key, status, lane, stage, rank, attempt, failures, most, position, ref, metadata, worker, why = (
        row
    )
    return m.TaskInfo(
        number,
        key,
        STATUS[status],
        lane,
        stage,
        rank,
        attempt,
        failures,
        most,
        position,
        unpacked(ref),
        loaded(metadata),
        worker,
        why,
    )
