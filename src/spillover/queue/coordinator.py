"""The one process that decides: calls in, one transaction a group, answers out.

Guarantee: an answer is given only after its transaction is durable and this process was still the owner
afterwards. A call that fails changes nothing, and the others of its group go on.

Steps: callers queue up, and whoever commits takes all of them (`spillover.pool.group`). Overdue leases are
ended first, so that no call of the group can use one. Then every call runs in a savepoint of one
transaction. After the commit the control object is asked whether this process still owns the pool: then
everything that is answered happened before any takeover. If the commit fails, the memory is put back as
it was and every caller hears why.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from spillover.errors import Conflict, InputError, StoreFull
from spillover.pool import Owners, Pool
from spillover.pool.group import Group
from spillover.queue import bounds, checkpoints, consumers, tasks, views
from spillover.queue import messages as m
from spillover.queue.change import Change, Memory
from spillover.queue.inbox import MAX_WAITING, MAX_WAITING_BYTES, Inbox
from spillover.queue.proof import Proof
from spillover.queue.schema import make_tables
from spillover.queue.tasks import encoded
from spillover.store import LocalStore

__all__ = ["LEASE_SECONDS", "Coordinator"]

LEASE_SECONDS = 300.0
REMEMBERED = 100_000
"""How many keyed answers are kept at most; the oldest go first."""
REMEMBERED_BYTES = 256 << 20
"""How many bytes these have at most, keys and answers together; the newest is kept in any case."""
GROUP = 4096
PATIENCE = 0.1
"""How long a group waits for the clients that were just answered, as a share of what a commit takes."""
NO_QUEUE = 0
"""Under which the answers to calls that make a queue are kept: it is not there when they come."""
Handler = Callable[[Change, Any], Any]


def _create(change: Change, call: m.Create) -> None:
    if call.queue not in change.memory.queues:
        change.add_queue(call.queue, "live")


HANDLERS: dict[type[m.Call], tuple[Handler, Any]] = {
    m.Create: (_create, None),
    m.Submit: (tasks.submit, m.Submitted),
    m.Acquire: (tasks.acquire, m.Acquired),
    m.Renew: (tasks.renew, list[bool]),
    m.Complete: (tasks.complete, list[m.Receipt]),
    m.Yield: (tasks.yield_tasks, int),
    m.Release: (tasks.release, int),
    m.Fail: (tasks.fail, int),
    m.Cancel: (tasks.cancel, int),
    m.Retry: (tasks.retry, int),
    m.Limit: (bounds.limit, None),
    m.Seal: (tasks.seal, None),
    m.Retire: (tasks.retire, int),
    m.OpenConsumer: (consumers.open_consumer, m.Consumer),
    m.CloseConsumer: (consumers.close_consumer, bool),
    m.Ack: (consumers.acknowledge, m.Consumer),
    m.Rewind: (consumers.rewind, m.Consumer),
    m.PlanBatch: (consumers.plan_batch, m.Batch),
    m.BatchReady: (consumers.batch_ready, m.Batch),
    m.FinishBatch: (consumers.finish_batch, m.Batch),
    m.Snapshot: (checkpoints.snapshot, m.CheckpointInfo),
    m.Fork: (checkpoints.fork, None),
    m.Restore: (checkpoints.restore, None),
    m.DropCheckpoint: (checkpoints.drop, bool),
    m.Trim: (checkpoints.trim, int),
}
"""What answers a call that changes something, and the type of its answer."""
VIEWS: dict[type[m.Call], tuple[Callable[..., Any], Any]] = {
    m.ReadStats: (views.stats, m.Stats),
    m.ReadTask: (views.task, m.TaskInfo | None),
    m.ListTasks: (views.task_list, list[m.TaskInfo]),
    m.ReadLog: (views.log, list[m.Receipt]),
    m.ReadConsumer: (views.consumer, m.Consumer),
    m.ReadBatch: (views.batch, m.Batch),
    m.ReadProducer: (views.producer, Any),
    m.ReadCheckpoints: (views.checkpoints, list[m.CheckpointInfo]),
}
"""What answers a call that only looks, and the type of its answer."""


@dataclass
class Counters:
    """What a coordinator did since it began.

    Attributes:
        calls: by kind and outcome, ``ok`` or the error's class.
        commits: transactions.
        seconds: what they took together.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    commits: int = 0
    seconds: float = 0.0


class Coordinator:
    """All queues of a pool, in this process. Threads may share it; a context manager.

    Args:
        pool: whose payloads the queues speak of.
        lease_seconds: how long a lease lasts without a renewal.
        takeover: do not ask whether the former owner is dead; it is fenced off in any case.
        clock: monotonic seconds; tests bring their own.
        max_waiting: most calls of clients that may wait; see `spillover.queue.inbox`.
        max_waiting_bytes: most bytes of them.

    Attributes:
        inbox: where transports enter the calls of clients.

    Raises:
        LockContended: another live process coordinates this pool.
        Mismatch: the tables are those of another version.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        lease_seconds: float = LEASE_SECONDS,
        takeover: bool = False,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self.inbox = Inbox(max_waiting, max_waiting_bytes)
        self.owners: Owners = pool.owners(takeover=takeover)
        self._catalogue = self.owners.catalogue
        self._proof = Proof(LocalStore(pool.path / "owner", pool.folder.disk), self.owners.generation)
        self._clock = clock
        self.counters = Counters()
        self._memory = Memory(lease_seconds, self.owners.generation)
        self._unsure = True
        self._group: Group[m.Call, Any] = Group(self._commit, lambda call: 1, GROUP, PATIENCE)
        try:
            with self._catalogue.changing() as cursor:
                make_tables(cursor)
                self._remember(cursor)
        except BaseException:
            self.close()
            raise

    def call(self, call: m.Call) -> Any:
        """Do one call, durably; see `spillover.queue.messages` for what each answers.

        Raises:
            SpillError: the call was refused, and changed nothing.
        """
        if (view := VIEWS.get(type(call))) is not None:
            self._end_overdue()
            with self._catalogue.reading() as cursor, _fitting(call):
                self._remember(cursor)
                found = view[0](cursor, self._memory, self._memory.queue(call.queue), call)
            self.check()
            return found
        (answer,) = self._group(call)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def queues(self) -> list[m.Stats]:
        """All queues in figures, by name."""
        return [self.call(m.ReadStats(queue=name)) for name in sorted(self._memory.queues)]

    def check(self) -> None:
        """Return if this process owns the pool, by what is written there now.

        `Owners.check` may go by what it read a moment ago. That is not enough for an answer: a mount that was
        away for this moment may have lost the lock to somebody else.

        Raises:
            Superseded: another process owns it, or did meanwhile.
            StoreError: it cannot be read.
        """
        self.owners.check()
        self._proof.check()

    def drain(self, queue: str, *, draining: bool = True) -> None:
        """Hand out no more tasks of a queue until told otherwise, or until the coordinator restarts."""
        change = self._memory.draining.add if draining else self._memory.draining.discard
        change(queue)

    def close(self) -> None:
        """Stop coordinating; leases stay as they are."""
        self._proof.close()
        with contextlib.suppress(OSError):  # of a mount that is away: its lock is gone with it
            self.owners.close()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _commit(self, calls: Sequence[m.Call]) -> list[tuple[Any]]:
        begun = time.perf_counter()
        with self._catalogue.changing() as cursor:
            self._remember(cursor)
            change = Change(cursor, self._catalogue.ledger, self._memory, self._clock())
            self._unsure = True  # until the end: Ctrl-C may come between any two steps
            try:
                tasks.expire(change)
                answers = [(self._answer(change, call),) for call in calls]
                change.flush()
                cursor.execute("COMMIT")
            except Exception:
                change.undo()
                self._unsure = False
                raise
            self._unsure = False
        self.check()
        self.counters.commits += 1
        self.counters.seconds += time.perf_counter() - begun
        for call, (answer,) in zip(calls, answers, strict=True):
            outcome = type(answer).__name__ if isinstance(answer, BaseException) else "ok"
            self.counters.calls[type(call).__name__, outcome] += 1
        return answers

    def _end_overdue(self) -> None:
        """End leases that ran out, so that nobody sees one that is over.

        A full disk keeps them, and does not keep anybody from looking.
        """
        if self._memory.leases.due(self._clock()):
            with contextlib.suppress(StoreFull):
                self._commit([])

    def _remember(self, cursor: sqlite3.Cursor) -> None:
        """Read the memory from the database again, if it may not be what was committed."""
        if self._unsure:
            self._memory.load(cursor, self._clock())
            self._unsure = False

    def _answer(self, change: Change, call: m.Call) -> Any:
        """The answer to one call, or the error that refused it."""
        handler, answers = HANDLERS[type(call)]
        try:
            with change.call(), _fitting(call):
                if call.key is None:
                    return handler(change, call)
                return self._once(change, call, handler, answers)
        except sqlite3.Error:  # of the whole transaction
            raise
        except Exception as error:
            return error

    def _once(self, change: Change, call: m.Call, handler: Handler, answers: Any) -> Any:
        """Answer a keyed call, from the table if it was answered before."""
        queue = NO_QUEUE if isinstance(call, (m.Create, m.Fork)) else change.queue(call.queue).id
        cursor = change.cursor
        digest = xxhash.xxh3_128_digest(encoded(call))
        query = "SELECT digest, answer FROM answers WHERE queue = ? AND key = ?"
        known = cursor.execute(query, (queue, call.key)).fetchone()
        if known is not None:
            if known[0] != digest:
                raise Conflict(f"request {call.key!r} was answered before, with other content")
            return msgspec.msgpack.decode(known[1], type=answers)
        answer = handler(change, call)
        if isinstance(answer, m.Acquired) and not answer.leases:
            return answer  # nothing happened: a worker that asks again and again writes nothing
        kept, memory = msgspec.msgpack.encode(answer), change.memory
        cursor.execute(
            "INSERT INTO answers(queue, key, digest, answer, start) VALUES(?, ?, ?, ?, ?)",
            (queue, call.key, digest, kept, memory.answered),
        )
        memory.answered += len(digest) + len(kept) + len(f"{call.key}".encode())
        _forget(cursor, cursor.lastrowid or 0, memory.answered)
        return answer


def _forget(cursor: sqlite3.Cursor, newest: int, end: int) -> None:
    """Delete the oldest answers beyond the bounds; ``end`` is where the newest ends among all bytes."""
    cursor.execute("DELETE FROM answers WHERE id <= ? - ?", (newest, REMEMBERED))
    query = "SELECT id FROM answers WHERE start >= ? OR id = ? ORDER BY id LIMIT 1"
    ((kept,),) = cursor.execute(query, (end - REMEMBERED_BYTES, newest)).fetchall()
    cursor.execute("DELETE FROM answers WHERE id < ?", (kept,))


@contextlib.contextmanager
def _fitting(call: m.Call) -> Iterator[None]:
    """Say of a value that neither JSON nor the database can hold which call it came with."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{type(call).__name__} holds a value that cannot be stored: {error}") from error
