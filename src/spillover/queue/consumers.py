"""Readers of the accepted log, and the batches they build from it.

A consumer acknowledges positions in any order. All before its low-water mark are acknowledged; those above
are rows of ``acks``, which vanish as the mark passes them. A result stays readable until every consumer has
acknowledged it, and as long as there is no consumer.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from spillover.errors import Collected, Conflict, InputError, NotAllowed
from spillover.pool import Ref
from spillover.queue import messages as m
from spillover.queue.change import Change, QueueState
from spillover.queue.schema import Kind, owner
from spillover.queue.tasks import dumped, loaded, packed, unpacked

__all__ = [
    "acknowledge",
    "batch_ready",
    "close_consumer",
    "finish_batch",
    "open_consumer",
    "plan_batch",
    "read_batch",
    "read_consumer",
    "read_log",
    "rewind",
]


def open_consumer(change: Change, call: m.OpenConsumer) -> m.Consumer:
    """Register a consumer that starts at ``start``, or find it again.

    By default it starts at the first position from which on everything is still there.

    Raises:
        Collected: a result from ``start`` on was let go already.
    """
    queue = change.queue(call.queue)
    if _find(change.cursor, queue, call.consumer) is None:
        start = _kept_from(change.cursor, queue) if call.start is None else call.start
        if not 0 <= start <= queue.positions:
            raise InputError(f"queue {queue.name!r} has positions 0 to {queue.positions}, not {start}")
        _require_kept(change.cursor, queue, start)
        change.cursor.execute(
            "INSERT INTO consumers(id, queue, name, low) VALUES(?, ?, ?, ?)",
            (change.numbers(1), queue.id, call.consumer, start),
        )
    return read_consumer(change.cursor, queue, call.consumer)


def close_consumer(change: Change, call: m.CloseConsumer) -> bool:
    """Remove a consumer, what it saved and its batches."""
    queue, cursor = change.queue(call.queue), change.cursor
    if (found := _find(cursor, queue, call.consumer)) is None:
        return False
    number = found[0]
    _let_payloads_go(change, number)
    cursor.execute("DELETE FROM batches WHERE consumer = ?", (number,))
    cursor.execute("DELETE FROM acks WHERE consumer = ?", (number,))
    cursor.execute("DELETE FROM consumers WHERE id = ?", (number,))
    if cursor.execute("SELECT 1 FROM consumers WHERE queue = ?", (queue.id,)).fetchone():
        query = "SELECT position FROM accepted WHERE queue = ? AND held = 1"
        _let_go(change, queue, [position for (position,) in cursor.execute(query, (queue.id,)).fetchall()])
    return True


def acknowledge(change: Change, call: m.Ack) -> m.Consumer:
    """Acknowledge positions, and save the consumer's state with them. Twice is fine.

    Raises:
        InputError: a position that nothing was accepted at.
    """
    queue = change.queue(call.queue)
    number, low = _require(change.cursor, queue, call.consumer)
    _acknowledge(change, queue, number, low, call.positions)
    if call.save:
        _save(change, number, call)
    return read_consumer(change.cursor, queue, call.consumer)


def rewind(change: Change, call: m.Rewind) -> m.Consumer:
    """Move a consumer back: everything from ``position`` on is to be read and acknowledged again.

    Raises:
        Collected: a result from there on was let go already.
    """
    queue = change.queue(call.queue)
    number, low = _require(change.cursor, queue, call.consumer)
    if not 0 <= call.position <= low:
        raise InputError(f"consumer {call.consumer!r} is at position {low}: {call.position} is not behind it")
    _require_kept(change.cursor, queue, call.position)
    change.cursor.execute("DELETE FROM acks WHERE consumer = ? AND position >= ?", (number, call.position))
    change.cursor.execute("UPDATE consumers SET low = ? WHERE id = ?", (call.position, number))
    return read_consumer(change.cursor, queue, call.consumer)


def read_consumer(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> m.Consumer:
    """Where a consumer is, and what it saved."""
    number, low = _require(cursor, queue, name)
    query = "SELECT position FROM acks WHERE consumer = ? ORDER BY position"
    positions = [position for (position,) in cursor.execute(query, (number,))]
    state, ref = cursor.execute("SELECT state, state_ref FROM consumers WHERE id = ?", (number,)).fetchone()
    return m.Consumer(low, positions, loaded(state), unpacked(ref))


def read_log(cursor: sqlite3.Cursor, queue: QueueState, start: int, limit: int) -> list[m.Receipt]:
    """Accepted results from position ``start`` on, at most ``limit``."""
    query = (
        "SELECT accepted.position, key, accepted.attempt, accepted.worker, result, accepted.metadata "
        "FROM accepted JOIN tasks ON tasks.id = task "
        "WHERE accepted.queue = ? AND accepted.position >= ? ORDER BY accepted.position LIMIT ?"
    )
    return [
        m.Receipt(position, key, attempt, worker, unpacked(result), loaded(metadata))
        for position, key, attempt, worker, result, metadata in cursor.execute(
            query, (queue.id, start, limit)
        )
    ]


def plan_batch(change: Change, call: m.PlanBatch) -> m.Batch:
    """Record a batch's positions and plan. The same again is fine.

    Raises:
        Conflict: the batch was planned otherwise.
    """
    queue = change.queue(call.queue)
    number, _ = _require(change.cursor, queue, call.consumer)
    known = _batch(change.cursor, queue, call.batch)
    if known is not None:
        if known.positions != call.positions or known.plan != call.plan:
            raise Conflict(f"batch {call.batch!r} was planned with other positions or another plan")
        return known
    _require_positions(queue, call.positions)
    batch = change.numbers(1)
    change.cursor.execute(
        "INSERT INTO batches VALUES(?, ?, ?, ?, 'planned', ?, ?, NULL)",
        (batch, queue.id, call.batch, number, dumped(call.positions), packed(call.plan)),
    )
    if call.plan is not None:
        change.ledger.own(change.cursor, [(owner(Kind.PLAN, batch), call.plan)])
    return read_batch(change.cursor, queue, call.batch)


def batch_ready(change: Change, call: m.BatchReady) -> m.Batch:
    """Record what was built. The same again is fine.

    Raises:
        Conflict: something else was built before.
    """
    queue = change.queue(call.queue)
    batch = read_batch(change.cursor, queue, call.batch)
    if batch.status != "planned":
        if batch.ready != call.ready and batch.status == "ready":
            raise Conflict(f"batch {call.batch!r} is ready with another payload")
        return batch
    number = _batch_number(change.cursor, queue, call.batch)
    change.cursor.execute(
        "UPDATE batches SET status = 'ready', ready = ? WHERE id = ?", (packed(call.ready), number)
    )
    if call.ready is not None:
        change.ledger.own(change.cursor, [(owner(Kind.READY, number), call.ready)])
    return read_batch(change.cursor, queue, call.batch)


def finish_batch(change: Change, call: m.FinishBatch) -> m.Batch:
    """Acknowledge the batch's positions for its consumer, and let its payloads go. Twice is fine.

    Raises:
        NotAllowed: it is not ready.
    """
    queue = change.queue(call.queue)
    batch = read_batch(change.cursor, queue, call.batch)
    if batch.status == "planned":
        raise NotAllowed(f"batch {call.batch!r} is not ready")
    if batch.status == "ready":
        number = _batch_number(change.cursor, queue, call.batch)
        consumer, low = _require(change.cursor, queue, batch.consumer)
        _acknowledge(change, queue, consumer, low, batch.positions)
        payloads = [(Kind.PLAN, batch.plan), (Kind.READY, batch.ready)]
        change.ledger.disown(
            change.cursor, [(owner(kind, number), ref) for kind, ref in payloads if ref is not None]
        )
        change.cursor.execute(
            "UPDATE batches SET status = 'finished', plan = NULL, ready = NULL WHERE id = ?", (number,)
        )
    return read_batch(change.cursor, queue, call.batch)


def read_batch(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> m.Batch:
    """A batch.

    Raises:
        InputError: there is none of that name.
    """
    if (batch := _batch(cursor, queue, name)) is None:
        raise InputError(f"queue {queue.name!r} has no batch {name!r}")
    return batch


def _batch(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> m.Batch | None:
    query = (
        "SELECT batches.name, consumers.name, status, positions, plan, ready "
        "FROM batches JOIN consumers ON consumers.id = consumer WHERE batches.queue = ? AND batches.name = ?"
    )
    row = cursor.execute(query, (queue.id, name)).fetchone()
    if row is None:
        return None
    name, consumer, status, positions, plan, ready = row
    return m.Batch(name, consumer, status, msgspec.json.decode(positions), unpacked(plan), unpacked(ready))


def _batch_number(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> int:
    query = "SELECT id FROM batches WHERE queue = ? AND name = ?"
    ((number,),) = cursor.execute(query, (queue.id, name)).fetchall()
    return int(number)


def _find(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> tuple[int, int] | None:
    query = "SELECT id, low FROM consumers WHERE queue = ? AND name = ?"
    found: tuple[int, int] | None = cursor.execute(query, (queue.id, name)).fetchone()
    return found


def _require(cursor: sqlite3.Cursor, queue: QueueState, name: str) -> tuple[int, int]:
    """Number and low-water mark of a consumer."""
    if (found := _find(cursor, queue, name)) is None:
        raise InputError(
            f"queue {queue.name!r} has no consumer {name!r}", hint="open_consumer(name) makes one"
        )
    return found


def _kept_from(cursor: sqlite3.Cursor, queue: QueueState) -> int:
    """The first position from which on no result was let go."""
    first = queue.positions
    query = "SELECT position FROM accepted WHERE queue = ? AND held = 1 ORDER BY position DESC"
    for (position,) in cursor.execute(query, (queue.id,)):
        if position != first - 1:
            break
        first = position
    return first


def _require_kept(cursor: sqlite3.Cursor, queue: QueueState, start: int) -> None:
    if start < (first := _kept_from(cursor, queue)):
        raise Collected(
            f"the result at position {first - 1} was acknowledged by every consumer and let go",
            hint="keep a second consumer, or a checkpoint, at the position to return to",
        )


def _require_positions(queue: QueueState, positions: list[int]) -> None:
    if positions and not 0 <= min(positions) <= max(positions) < queue.positions:
        raise InputError(f"queue {queue.name!r} has accepted positions 0 to {queue.positions - 1}")


def _acknowledge(change: Change, queue: QueueState, number: int, low: int, positions: list[int]) -> None:
    _require_positions(queue, positions)
    cursor = change.cursor
    cursor.executemany(
        "INSERT OR IGNORE INTO acks VALUES(?, ?)",
        [(number, position) for position in positions if position >= low],
    )
    mark = low
    query = "SELECT position FROM acks WHERE consumer = ? AND position >= ? ORDER BY position"
    for (position,) in cursor.execute(query, (number, low)):
        if position != mark:
            break
        mark += 1
    if mark != low:
        cursor.execute("DELETE FROM acks WHERE consumer = ? AND position < ?", (number, mark))
        cursor.execute("UPDATE consumers SET low = ? WHERE id = ?", (mark, number))
    _let_go(change, queue, positions)


def _let_go(change: Change, queue: QueueState, positions: list[int]) -> None:
    """Stop holding the results that every consumer has acknowledged."""
    cursor = change.cursor
    query = (
        "SELECT task, result FROM accepted AS a WHERE queue = ? AND position = ? AND held = 1 "
        "AND NOT EXISTS(SELECT 1 FROM consumers WHERE consumers.queue = a.queue AND low <= a.position "
        "AND NOT EXISTS(SELECT 1 FROM acks WHERE consumer = consumers.id AND acks.position = a.position))"
    )
    rows: list[tuple[int, bytes | None, int]] = []
    for position in dict.fromkeys(positions):
        if (row := cursor.execute(query, (queue.id, position)).fetchone()) is not None:
            rows.append((*row, position))
    owned = [
        (owner(Kind.RESULT, task), Ref.from_bytes(result)) for task, result, _ in rows if result is not None
    ]
    change.ledger.disown(cursor, owned)
    cursor.executemany(
        "UPDATE accepted SET held = 0 WHERE queue = ? AND position = ?",
        [(queue.id, position) for *_, position in rows],
    )
    if rows:
        change.changing(queue.name).undelivered -= len(rows)


def _let_payloads_go(change: Change, consumer: int) -> None:
    """Disown what a consumer saved, and what its batches are made of."""
    state = "SELECT id, state_ref FROM consumers WHERE id = ?"
    rows = [(Kind.STATE, *change.cursor.execute(state, (consumer,)).fetchone())]
    query = "SELECT id, plan, ready FROM batches WHERE consumer = ?"
    for batch, plan, ready in change.cursor.execute(query, (consumer,)).fetchall():
        rows += [(Kind.PLAN, batch, plan), (Kind.READY, batch, ready)]
    change.ledger.disown(
        change.cursor, [(owner(kind, row), Ref.from_bytes(ref)) for kind, row, ref in rows if ref is not None]
    )


def _save(change: Change, number: int, call: m.Ack) -> None:
    """Replace what the consumer saved."""
    key = owner(Kind.STATE, number)
    (old,) = change.cursor.execute("SELECT state_ref FROM consumers WHERE id = ?", (number,)).fetchone()
    if old is not None:
        change.ledger.disown(change.cursor, [(key, Ref.from_bytes(old))])
    if call.state_ref is not None:
        change.ledger.own(change.cursor, [(key, call.state_ref)])
    values: tuple[Any, ...] = (dumped(call.state), packed(call.state_ref), number)
    change.cursor.execute("UPDATE consumers SET state = ?, state_ref = ? WHERE id = ?", values)
