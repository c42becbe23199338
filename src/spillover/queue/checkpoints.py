"""A queue kept as it was, and queues that begin as another one was.

A checkpoint is a queue that nobody works on: a copy of the rows that still matter, which owns the same
payloads. Forking and restoring copy them once more. What is unfinished is pending in every copy, leased or
not; finished tasks are copied only as long as some consumer has still to acknowledge their result.
"""

from __future__ import annotations

import sqlite3

from spillover.errors import InputError, NotAllowed
from spillover.pool import Ref
from spillover.queue import messages as m
from spillover.queue.change import Change, QueueState, queue_rows
from spillover.queue.schema import COMPLETED, DEAD, PENDING, Kind, owner

__all__ = ["OWNED", "drop", "fork", "restore", "snapshot", "trim"]

_TASKS = """
INSERT INTO tasks(id, queue, key, status, lane, stage, rank, turn, attempt, failures, max_attempts, digest,
    position, input, metadata, worker, failure)
SELECT :first + ROW_NUMBER() OVER (ORDER BY id), :target, key, CASE status WHEN 1 THEN 0 ELSE status END,
    lane, stage, rank, turn, attempt, failures, max_attempts, digest, position, input, metadata, NULL, failure
FROM tasks WHERE queue = :source AND (status IN (0, 1, 3) OR status = 2 AND EXISTS(
    SELECT 1 FROM accepted AS a WHERE a.queue = :source AND a.position = tasks.position AND held = 1))
"""
_ACCEPTED = """
INSERT INTO accepted SELECT :target, a.position, copy.id, a.attempt, result, a.metadata, a.worker, 1
FROM accepted AS a JOIN tasks AS copy ON copy.queue = :target AND copy.position = a.position
WHERE a.queue = :source AND held = 1
"""
_CONSUMERS = """
INSERT INTO consumers SELECT :first + ROW_NUMBER() OVER (ORDER BY id), :target, name, low, state, state_ref
FROM consumers WHERE queue = :source
"""
_ACKS = """
INSERT INTO acks SELECT copy.id, position FROM acks JOIN consumers AS c ON c.id = consumer
JOIN consumers AS copy ON copy.queue = :target AND copy.name = c.name WHERE c.queue = :source
"""
_BATCHES = """
INSERT INTO batches SELECT :first + ROW_NUMBER() OVER (ORDER BY b.id), :target, b.name, copy.id, status,
    positions, plan, ready
FROM batches AS b JOIN consumers AS c ON c.id = consumer
JOIN consumers AS copy ON copy.queue = :target AND copy.name = c.name
WHERE b.queue = :source AND status != 'finished'
"""
OWNED = (
    (Kind.INPUT, "SELECT id, input FROM tasks WHERE queue = ? AND input IS NOT NULL"),
    (Kind.RESULT, "SELECT task, result FROM accepted WHERE queue = ? AND held = 1 AND result IS NOT NULL"),
    (Kind.STATE, "SELECT id, state_ref FROM consumers WHERE queue = ? AND state_ref IS NOT NULL"),
    (Kind.PLAN, "SELECT id, plan FROM batches WHERE queue = ? AND plan IS NOT NULL"),
    (Kind.READY, "SELECT id, ready FROM batches WHERE queue = ? AND ready IS NOT NULL"),
)
"""What rows own: kind, and a query of number and reference, given a queue."""
_TABLES = ("tasks", "accepted", "producers", "consumers", "batches")
"""What a restore replaces; a worker that was retired stays so."""


def snapshot(change: Change, call: m.Snapshot) -> m.CheckpointInfo:
    """Keep a queue as it is now.

    Raises:
        NotAllowed: there is a checkpoint of that name.
    """
    source = change.queue(call.queue)
    if _find(change.cursor, call.checkpoint) is not None:
        raise NotAllowed(f"there is a checkpoint {call.checkpoint!r}", hint="choose another name, or drop it")
    target = change.add_queue(call.checkpoint, "checkpoint", call.queue)
    _copy(change, source.id, target)
    _continue(target, source)
    return m.CheckpointInfo(
        call.checkpoint, call.queue, target.counts[PENDING] + target.counts[DEAD], target.counts[COMPLETED]
    )


def fork(change: Change, call: m.Fork) -> None:
    """Begin a new queue as a checkpoint was.

    Raises:
        NotAllowed: there is a queue of that name.
        InputError: there is no such checkpoint.
    """
    source = _require(change.cursor, call.checkpoint)
    if call.queue in change.memory.queues:
        raise NotAllowed(f"there is a queue {call.queue!r}", hint="fork into a new name, or restore")
    target = change.add_queue(call.queue, "live", call.checkpoint)
    _copy(change, source.id, target)
    _continue(target, source)


def restore(change: Change, call: m.Restore) -> None:
    """Set a queue back to a checkpoint; what happened since then is gone. Its bounds stay as they are.

    Raises:
        InputError: there is no such checkpoint.
    """
    source = _require(change.cursor, call.checkpoint)
    target = change.changing(call.queue)
    change.unlease([held.number for held in change.memory.leases.all() if held.queue == target.id])
    _clear(change, target.id)
    target.counts = [0] * len(target.counts)
    _copy(change, source.id, target)
    target.positions, target.sealed = source.positions, source.sealed


def drop(change: Change, call: m.DropCheckpoint) -> bool:
    """Let a checkpoint and what it owns go."""
    change.queue(call.queue)
    found = _find(change.cursor, call.checkpoint)
    if found is None:
        return False
    _clear(change, found.id)
    change.cursor.execute("DELETE FROM retired WHERE queue = ?", (found.id,))
    change.cursor.execute("DELETE FROM queues WHERE id = ?", (found.id,))
    return True


def trim(change: Change, call: m.Trim) -> int:
    """Forget finished tasks whose results were let go."""
    queue = change.changing(call.queue)
    rows = "SELECT task FROM accepted WHERE queue = ? AND position < ? AND held = 0"
    change.cursor.execute(f"DELETE FROM tasks WHERE id IN ({rows})", (queue.id, call.position))
    count = change.cursor.rowcount
    change.cursor.execute(
        "DELETE FROM accepted WHERE queue = ? AND position < ? AND held = 0", (queue.id, call.position)
    )
    queue.counts[COMPLETED] -= count
    return count


def _copy(change: Change, source: int, target: QueueState) -> None:
    cursor, ends = change.cursor, {"source": source, "target": target.id}
    for table, statement in (("tasks", _TASKS), ("consumers", _CONSUMERS), ("batches", _BATCHES)):
        ((count,),) = cursor.execute(f"SELECT COUNT(*) FROM {table} WHERE queue = ?", (source,)).fetchall()
        cursor.execute(statement, ends | {"first": change.numbers(count + 1)})
    target.undelivered = cursor.execute(_ACCEPTED, ends).rowcount
    cursor.execute(_ACKS, ends)
    cursor.execute(
        "INSERT INTO producers SELECT :target, name, cursor FROM producers WHERE queue = :source", ends
    )
    cursor.execute(
        "INSERT OR IGNORE INTO retired SELECT :target, worker FROM retired WHERE queue = :source", ends
    )
    for kind, query in OWNED:
        rows = cursor.execute(query, (target.id,)).fetchall()
        change.ledger.own(cursor, [(owner(kind, number), Ref.from_bytes(ref)) for number, ref in rows])
    for status, count in cursor.execute(
        "SELECT status, COUNT(*) FROM tasks WHERE queue = ? GROUP BY status", (target.id,)
    ).fetchall():
        target.counts[status] = count


def _clear(change: Change, queue: int) -> None:
    """Delete everything of a queue but its row and its retired workers."""
    cursor = change.cursor
    for kind, query in OWNED:
        rows = cursor.execute(query, (queue,)).fetchall()
        change.ledger.disown(cursor, [(owner(kind, number), Ref.from_bytes(ref)) for number, ref in rows])
    cursor.execute("DELETE FROM acks WHERE consumer IN (SELECT id FROM consumers WHERE queue = ?)", (queue,))
    for table in _TABLES:
        cursor.execute(f"DELETE FROM {table} WHERE queue = ?", (queue,))


def _continue(target: QueueState, source: QueueState) -> None:
    """Let a queue go on with the settings of another."""
    target.positions, target.sealed = source.positions, source.sealed
    target.max_unfinished, target.max_undelivered = source.max_unfinished, source.max_undelivered


def _find(cursor: sqlite3.Cursor, checkpoint: str) -> QueueState | None:
    found = queue_rows(cursor, "kind = 'checkpoint' AND name = ?", checkpoint)
    return found[0] if found else None


def _require(cursor: sqlite3.Cursor, checkpoint: str) -> QueueState:
    """A checkpoint's row."""
    if (found := _find(cursor, checkpoint)) is None:
        raise InputError(f"there is no checkpoint {checkpoint!r}")
    return found
