"""What happens to a task: submitted, handed out, continued, accepted, failed.

Every function works inside a `Change`, checks everything before it writes, and answers the call. A task is
pending, leased, completed, dead or cancelled. Its lease names an attempt; an attempt that is not the task's
current one is refused with the reason, whatever it asks for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

from spillover.errors import Conflict, InputError, NotAllowed, Stale, Superseded
from spillover.pool import Ref
from spillover.queue import bounds
from spillover.queue import messages as m
from spillover.queue.change import Change, QueueState
from spillover.queue.leases import Held
from spillover.queue.rows import insert, numbered
from spillover.queue.schema import CANCELLED, COMPLETED, DEAD, LEASED, PENDING, STATUS, Kind, owner

__all__ = [
    "acquire",
    "cancel",
    "complete",
    "encoded",
    "expire",
    "fail",
    "release",
    "renew",
    "retire",
    "retry",
    "seal",
    "submit",
    "yield_tasks",
]

encoded = msgspec.msgpack.Encoder(order="deterministic").encode
"""What a digest is taken of: the order of a mapping's keys is no content."""
_json = msgspec.json.Encoder().encode


def submit(change: Change, call: m.Submit) -> m.Submitted:
    """Add tasks; those that are there already with the same content are fine.

    Raises:
        Conflict: one is there with other content. Nothing is added, and the cursor stays.
        NotAllowed: the queue is sealed.
        Full: the queue would hold more unfinished tasks than it may. Likewise.
    """
    queue = change.changing(call.queue)
    first = change.numbers(len(call.tasks))
    rows = [
        (
            number,
            queue.id,
            task.id,
            PENDING,
            task.lane,
            task.stage,
            task.rank,
            number,
            task.max_attempts,
            xxhash.xxh3_64_intdigest(encoded(task)) - (1 << 63),
            packed(task.input),
            dumped(task.metadata),
        )
        for number, task in enumerate(call.tasks, first)
    ]
    added = insert(
        change.cursor,
        "tasks(id, queue, key, status, lane, stage, rank, turn, max_attempts, digest, input, metadata)",
        rows,
        "ON CONFLICT(queue, key) DO NOTHING",
    )
    fresh = {*range(first, first + len(rows))}
    if added != len(rows):
        fresh = _known(change, rows)
    if fresh and queue.sealed:
        raise NotAllowed(f"queue {queue.name!r} is sealed: it takes no more tasks")
    bounds.require_room(queue, added)
    change.ledger.own(
        change.cursor,
        [
            (owner(Kind.INPUT, number), task.input)
            for number, task in enumerate(call.tasks, first)
            if task.input is not None and number in fresh
        ],
    )
    queue.counts[PENDING] += added
    if call.producer is not None:
        change.cursor.execute(
            "INSERT OR REPLACE INTO producers VALUES(?, ?, ?)", (queue.id, call.producer, dumped(call.cursor))
        )
    return m.Submitted(added)


def acquire(change: Change, call: m.Acquire) -> m.Acquired:
    """Lease pending tasks, in the queue's order.

    Raises:
        InputError: the limit is below one.
        Superseded: the worker was retired.
    """
    if call.limit < 1:
        raise InputError(f"acquire asks for {call.limit} tasks", hint="ask for at least one")
    queue = change.queue(call.queue)
    _require_active(change, queue, call.worker)
    if queue.name in change.memory.draining:
        return m.Acquired([], "draining")
    room = bounds.room_to_lease(queue, call.limit)
    if not room and queue.counts[PENDING]:
        return m.Acquired([], "backpressured")
    rows = _pending(change, queue, call if room == call.limit else msgspec.structs.replace(call, limit=room))
    if not rows:
        done = queue.sealed and not queue.counts[PENDING] and not queue.counts[LEASED]
        return m.Acquired([], "end" if done else "empty")
    queue = change.changing(call.queue)
    worker, seconds = call.worker, change.memory.lease_seconds
    change.cursor.execute(
        "UPDATE tasks SET status = 1, attempt = attempt + 1, worker = ? "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (worker, numbered(row[0] for row in rows)),
    )
    leases = [
        m.Lease(
            number,
            attempt + 1,
            key,
            worker,
            unpacked(ref),
            loaded(metadata),
            stage,
            rank,
            failures,
            seconds,
        )
        for number, key, attempt, stage, rank, failures, ref, metadata in rows
    ]
    change.lease(
        [Held(lease.number, lease.attempt, queue.id, lease.task, worker, lease.input) for lease in leases]
    )
    queue.counts[PENDING] -= len(rows)
    queue.counts[LEASED] += len(rows)
    return m.Acquired(leases, "acquired")


def renew(change: Change, call: m.Renew) -> list[bool]:
    """Extend leases. Nothing is written: time is the coordinator's own."""
    queue, leases = change.queue(call.queue), change.memory.leases
    helds = [leases.get(number) for number, _ in call.leases]
    answers = [
        held is not None and held.attempt == attempt and held.queue == queue.id
        for held, (_, attempt) in zip(helds, call.leases, strict=True)
    ]
    current = {number for (number, _), held in zip(call.leases, answers, strict=True) if held}
    leases.extend([*current], change.now + change.memory.lease_seconds)
    return answers


def complete(change: Change, call: m.Complete) -> list[m.Receipt]:
    """Accept results, each once: a repeat gets the first receipt.

    Raises:
        Stale: an attempt is not the task's current one. Nothing is accepted.
        Conflict: the attempt was accepted with another result.
    """
    queue = change.changing(call.queue)
    receipts: dict[int, m.Receipt] = {}
    fresh: list[tuple[Held, m.Completion]] = []
    for done in call.results:
        held = change.memory.leases.get(done.number)
        if held is not None and held.attempt == done.attempt and held.queue == queue.id:
            fresh.append((held, done))
        else:
            receipts[done.number] = _accepted(change, queue, done)
    position = queue.positions
    for held, done in fresh:
        receipts[done.number] = m.Receipt(
            position, held.key, held.attempt, held.worker, done.result, done.metadata
        )
        position += 1
    if len(receipts) != len(call.results):
        raise InputError("one call completes a task twice")
    cursor, start = change.cursor, queue.positions
    cursor.execute(
        "UPDATE tasks SET status = 2, position = ? + named.key, input = NULL "
        "FROM json_each(?) AS named WHERE tasks.id = named.value",
        (start, numbered(held.number for held, _ in fresh)),
    )
    insert(
        cursor,
        "accepted",
        [
            (
                queue.id,
                place,
                held.number,
                held.attempt,
                packed(done.result),
                dumped(done.metadata),
                held.worker,
                1,
            )
            for place, (held, done) in enumerate(fresh, start)
        ],
    )
    change.ledger.own(
        cursor,
        [(owner(Kind.RESULT, done.number), done.result) for _, done in fresh if done.result is not None],
    )
    _disown_inputs(change, (held for held, _ in fresh))
    change.unlease(held.number for held, _ in fresh)
    queue.positions = position
    queue.counts[LEASED] -= len(fresh)
    queue.counts[COMPLETED] += len(fresh)
    queue.undelivered += len(fresh)
    return [receipts[done.number] for done in call.results]


def yield_tasks(change: Change, call: m.Yield) -> int:
    """Return tasks with new inputs, to the end of their stage and rank."""
    queue = change.changing(call.queue)
    helds = [_current(change, queue, task.number, task.attempt) for task in call.tasks]
    _require_once(helds)
    first = change.numbers(len(helds))
    _disown_inputs(change, helds)
    change.ledger.own(
        change.cursor,
        [(owner(Kind.INPUT, task.number), task.input) for task in call.tasks if task.input is not None],
    )
    change.cursor.executemany(
        "UPDATE tasks SET status = 0, worker = NULL, stage = ?, rank = ?, turn = ?, input = ?, metadata = ? "
        "WHERE id = ?",
        [
            (task.stage, task.rank, turn, packed(task.input), dumped(task.metadata), task.number)
            for turn, task in enumerate(call.tasks, first)
        ],
    )
    _returned(change, queue, helds)
    return len(helds)


def release(change: Change, call: m.Release) -> int:
    """Return tasks as they were, to their place in line; returns how many leases were still held."""
    queue = change.changing(call.queue)
    helds = []
    for number, attempt in dict.fromkeys(call.leases):
        held = change.memory.leases.get(number)
        if held is not None and held.attempt == attempt and held.queue == queue.id:
            helds.append(held)
    change.cursor.execute(
        "UPDATE tasks SET status = 0, worker = NULL WHERE id IN (SELECT value FROM json_each(?))",
        (numbered(held.number for held in helds),),
    )
    _returned(change, queue, helds)
    return len(helds)


def fail(change: Change, call: m.Fail) -> int:
    """Count failed attempts; returns how many tasks are dead now.

    Raises:
        Stale: an attempt is not the task's current one. Nothing is counted.
    """
    queue = change.changing(call.queue)
    helds = [_current(change, queue, failure.number, failure.attempt) for failure in call.failures]
    _require_once(helds)
    return _failed(
        change,
        queue,
        [(held, why.reason, why.retryable) for held, why in zip(helds, call.failures, strict=True)],
    )


def expire(change: Change) -> None:
    """Count every lease that ran out as a failed attempt."""
    names = {queue.id: name for name, queue in change.memory.queues.items()}
    for held in change.memory.leases.overdue(change.now):
        queue = change.changing(names[held.queue])
        _failed(change, queue, [(held, f"the lease of worker {held.worker} ran out", True)])


def cancel(change: Change, call: m.Cancel) -> int:
    """End tasks that are pending, leased or dead."""
    queue = change.changing(call.queue)
    count = 0
    for key in call.tasks:
        query = "SELECT id, status, input FROM tasks WHERE queue = ? AND key = ?"
        row = change.cursor.execute(query, (queue.id, key)).fetchone()
        if row is None or row[1] in (COMPLETED, CANCELLED):
            continue
        number, status, ref = row
        if status == LEASED:
            change.unlease([number])
        if ref is not None:
            change.ledger.disown(change.cursor, [(owner(Kind.INPUT, number), Ref.from_bytes(ref))])
        change.cursor.execute(
            "UPDATE tasks SET status = 4, input = NULL, worker = NULL WHERE id = ?", (number,)
        )
        queue.counts[status] -= 1
        queue.counts[CANCELLED] += 1
        count += 1
    return count


def retry(change: Change, call: m.Retry) -> int:
    """Give dead tasks all their attempts again. A dead task keeps its input until it is cancelled."""
    queue = change.changing(call.queue)
    change.cursor.executemany(
        "UPDATE tasks SET status = 0, failures = 0, failure = NULL "
        "WHERE queue = ? AND key = ? AND status = 3",
        [(queue.id, key) for key in call.tasks],
    )
    count = change.cursor.rowcount if call.tasks else 0
    queue.counts[DEAD] -= count
    queue.counts[PENDING] += count
    return count


def seal(change: Change, call: m.Seal) -> None:
    """Refuse submissions from now on."""
    change.changing(call.queue).sealed = True


def retire(change: Change, call: m.Retire) -> int:
    """End a worker; returns how many leases it held."""
    queue = change.changing(call.queue)
    change.cursor.execute("INSERT OR IGNORE INTO retired VALUES(?, ?)", (queue.id, call.worker))
    helds = [
        held for held in change.memory.leases.all() if held.worker == call.worker and held.queue == queue.id
    ]
    change.cursor.executemany(
        "UPDATE tasks SET status = 0, worker = NULL WHERE id = ?", [(held.number,) for held in helds]
    )
    _returned(change, queue, helds)
    return len(helds)


def packed(ref: Ref | None) -> bytes | None:
    """A reference as a column.

    Raises:
        InputError: no publication can have it.
    """
    try:
        return None if ref is None else ref.pack_bytes()
    except struct.error as error:
        raise InputError(f"{ref!r} is no reference: {error}") from None


def unpacked(column: bytes | None) -> Ref | None:
    """Inverse of `packed`."""
    return None if column is None else Ref.from_bytes(column)


def dumped(value: Any) -> bytes | None:
    """JSON as a column."""
    return None if value is None else _json(value)


def loaded(column: bytes | None) -> Any:
    """Inverse of `dumped`."""
    return None if column is None else msgspec.json.decode(column)


def _known(change: Change, rows: Sequence[tuple[Any, ...]]) -> set[int]:
    """Numbers of the rows that were new, after comparing the others with what is there."""
    fresh = set()
    for row in rows:
        query = "SELECT id, digest FROM tasks WHERE queue = ? AND key = ?"
        number, digest = change.cursor.execute(query, (row[1], row[2])).fetchone()
        if number == row[0]:
            fresh.add(number)
        elif digest != row[9]:
            raise Conflict(f"task {row[2]!r} was submitted before with other content")
    return fresh


def _pending(change: Change, queue: QueueState, call: m.Acquire) -> list[tuple[Any, ...]]:
    columns = "tasks.id, tasks.key, attempt, stage, rank, failures, input, metadata"
    source, where, values = "tasks", "queue = ? AND lane = ? AND status = 0", [queue.id, call.lane]
    if call.prefix:
        where, values = where + " AND substr(tasks.key, 1, ?) = ?", [*values, len(call.prefix), call.prefix]
    if call.tasks is not None:  # by their ids, and not through all that is pending
        source = "json_each(?) AS named CROSS JOIN tasks ON tasks.key = named.value"
        values.insert(0, _json([*dict.fromkeys(call.tasks)]).decode())  # each once
    query = f"SELECT {columns} FROM {source} WHERE {where} ORDER BY stage, rank, turn LIMIT ?"
    return change.cursor.execute(query, (*values, call.limit)).fetchall()


def _current(change: Change, queue: QueueState, number: int, attempt: int) -> Held:
    """The lease, if this attempt is the current one.

    Raises:
        Stale: it is not; the message says what became of the task.
    """
    held = change.memory.leases.get(number)
    if held is not None and held.attempt == attempt and held.queue == queue.id:
        return held
    query = "SELECT key, status, attempt, worker, failure FROM tasks WHERE id = ? AND queue = ?"
    row = change.cursor.execute(query, (number, queue.id)).fetchone()
    if row is None:
        raise Stale(f"queue {queue.name!r} has no task number {number}")
    key, status, current, worker, failure = row
    if status == LEASED:
        became = f"worker {worker} has attempt {current}"
    else:
        became = f"the task is {STATUS[status]}" + (f" ({failure})" if failure else "")
    raise Stale(f"attempt {attempt} at task {key!r} is not current: {became}")


def _accepted(change: Change, queue: QueueState, done: m.Completion) -> m.Receipt:
    """The receipt that this attempt already has.

    Raises:
        Stale: it has none.
        Conflict: it has one for another result.
    """
    query = (
        "SELECT accepted.position, key, accepted.attempt, accepted.worker, result, accepted.metadata "
        "FROM tasks JOIN accepted ON accepted.queue = tasks.queue AND accepted.position = tasks.position "
        "WHERE tasks.id = ? AND tasks.queue = ? AND accepted.attempt = ?"
    )
    row = change.cursor.execute(query, (done.number, queue.id, done.attempt)).fetchone()
    if row is None:
        _current(change, queue, done.number, done.attempt)
        raise Stale(f"task number {done.number} has no such attempt")
    position, key, attempt, worker, result, metadata = row
    if result != packed(done.result) or loaded(metadata) != loaded(dumped(done.metadata)):
        raise Conflict(f"attempt {attempt} at task {key!r} was accepted with another result")
    return m.Receipt(position, key, attempt, worker, unpacked(result), loaded(metadata))


def _failed(change: Change, queue: QueueState, failures: Sequence[tuple[Held, str, bool]]) -> int:
    """Return tasks to their place in line, or to the dead ones; returns how many are dead."""
    dead = 0
    for held, reason, retryable in failures:
        (status,) = change.cursor.execute(
            "UPDATE tasks SET failures = failures + 1, failure = ?, worker = NULL, "
            "status = CASE WHEN ? AND failures + 1 < max_attempts THEN 0 ELSE 3 END "
            "WHERE id = ? RETURNING status",
            (reason, retryable, held.number),
        ).fetchone()
        queue.counts[LEASED] -= 1
        queue.counts[status] += 1
        dead += status == DEAD
    change.unlease(held.number for held, _, _ in failures)
    return dead


def _returned(change: Change, queue: QueueState, helds: Sequence[Held]) -> None:
    change.unlease(held.number for held in helds)
    queue.counts[LEASED] -= len(helds)
    queue.counts[PENDING] += len(helds)


def _disown_inputs(change: Change, helds: Iterable[Held]) -> None:
    change.ledger.disown(
        change.cursor,
        [(owner(Kind.INPUT, held.number), held.input) for held in helds if held.input is not None],
    )


def _require_active(change: Change, queue: QueueState, worker: str) -> None:
    query = "SELECT 1 FROM retired WHERE queue = ? AND worker = ?"
    if change.cursor.execute(query, (queue.id, worker)).fetchone():
        raise Superseded(f"worker {worker!r} was retired", hint="start it again under a new name")


def _require_once(helds: Sequence[Held]) -> None:
    if len({held.number for held in helds}) != len(helds):
        raise InputError("one call names a task twice")
