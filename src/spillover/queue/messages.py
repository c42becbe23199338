"""What clients and coordinator say to each other: one type a call, the same on every transport."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from spillover.pool import Ref

__all__ = [
    "DELIVERY",
    "FRESH",
    "PARTIAL",
    "UNRANKED",
    "Ack",
    "Acquire",
    "Acquired",
    "Batch",
    "Cancel",
    "CloseConsumer",
    "Complete",
    "Completion",
    "Consumer",
    "Fail",
    "Failure",
    "Lease",
    "Limit",
    "Receipt",
    "Release",
    "Renew",
    "Retry",
    "Seal",
    "Submit",
    "Submitted",
    "Task",
    "Yield",
    "Yielded",
]

DELIVERY, PARTIAL, FRESH = 0, 1, 2
"""Stages, in the order in which they are handed out."""
UNRANKED = (1 << 63) - 1
"""The scheduling key of a task that has none: last in its stage."""
BATCH = 100_000
"""The most items of a call that comes over a wire: small ones take many times their bytes in memory."""
T = TypeVar("T")
Many = Annotated[list[T], msgspec.Meta(max_length=BATCH)]


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of work to submit.

    Attributes:
        id: unique in its queue, for ever.
        input: a publication that stays readable until the task ends.
        metadata: anything that JSON can say.
        stage: `DELIVERY`, `PARTIAL` or `FRESH`; lower ones are handed out first.
        rank: scheduling key; within a stage lower ones are handed out first, then the first submitted.
        lane: who acquires names a lane and sees only its tasks.
        max_attempts: after so many failed attempts the task is dead.
    """

    id: str
    input: Ref | None = None
    metadata: Any = None
    stage: int = FRESH
    rank: int = UNRANKED
    lane: str = ""
    max_attempts: int = 3


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt of one worker at one task.

    Attributes:
        number: the task's number in the database.
        attempt: counts the times that the task was handed out; what an older one says is refused.
        task: the task's id.
        worker: who holds it.
        input: of the task, or of its last continuation.
        metadata, stage, rank: likewise.
        failures: attempts that failed before this one.
        seconds: how long it lasts without a renewal.
    """

    number: int
    attempt: int
    task: str
    worker: str
    input: Ref | None = None
    metadata: Any = None
    stage: int = FRESH
    rank: int = UNRANKED
    failures: int = 0
    seconds: float = 0.0


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted result.

    Attributes:
        position: its place in the queue's log, without gaps from 0.
        task: the task's id.
        attempt: the attempt that was accepted.
        worker: whose it was.
        result: the publication, readable until every consumer acknowledged it.
        metadata: what the worker added, as JSON.
    """

    position: int
    task: str
    attempt: int
    worker: str
    result: Ref | None = None
    metadata: Any = None


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished attempt, to be accepted."""

    number: int
    attempt: int
    result: Ref | None = None
    metadata: Any = None


class Yielded(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt that goes back to the queue with a new input, to be continued by anybody."""

    number: int
    attempt: int
    input: Ref | None = None
    metadata: Any = None
    stage: int = PARTIAL
    rank: int = UNRANKED


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failed attempt.

    Attributes:
        reason: one line.
        retryable: whether another attempt makes sense; otherwise the task is dead at once.
    """

    number: int
    attempt: int
    reason: str
    retryable: bool = True


class Call(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, kw_only=True):
    """Base of all calls.

    Attributes:
        queue: the queue's name.
        key: names the request, in its queue (`Create` and `Fork`: in the pool). Its repeat returns the
            first answer; only an `Acquire` that found nothing looks again.
    """

    queue: str
    key: str | None = None


class Submit(Call, frozen=True):
    """Add tasks, and move a producer's cursor in the same transaction. Answer: `Submitted`."""

    tasks: Many[Task]
    producer: str | None = None
    cursor: Any = None


class Submitted(msgspec.Struct, frozen=True):
    """How many of the tasks are new; the others were there already, with the same content."""

    added: int


class Acquire(Call, frozen=True):
    """Lease tasks, in the queue's order. Answer: `Acquired`."""

    worker: str
    limit: int = 1
    lane: str = ""
    prefix: str = ""
    tasks: Many[str] | None = None


class Acquired(msgspec.Struct, frozen=True):
    """Leases, and why there are no more.

    Attributes:
        status: ``acquired``; ``empty``: nothing is pending now; ``draining``; ``backpressured``: too much is
            undelivered; ``end``: nothing will come.
    """

    leases: list[Lease]
    status: str


class Renew(Call, frozen=True):
    """Extend leases by their full time from now. Answer: for each whether it is still held."""

    leases: Many[tuple[int, int]]


class Complete(Call, frozen=True):
    """Accept results; all or none. Answer: a `Receipt` for each."""

    results: Many[Completion]


class Yield(Call, frozen=True):
    """Return tasks with new inputs; all or none. Spends no attempt."""

    tasks: Many[Yielded]


class Release(Call, frozen=True):
    """Return tasks as they were. Spends no attempt; leases that are not held any more are skipped."""

    leases: Many[tuple[int, int]]


class Fail(Call, frozen=True):
    """Report failed attempts; all or none."""

    failures: Many[Failure]


class Cancel(Call, frozen=True):
    """End tasks that are not finished. Answer: how many there were."""

    tasks: Many[str]


class Retry(Call, frozen=True):
    """Make dead tasks pending again, with all their attempts before them. Answer: how many there were."""

    tasks: Many[str]


class Limit(Call, frozen=True):
    """Bound how much the queue may hold, or not with None; what is bounded is in `Stats`."""

    unfinished: int | None = None
    undelivered: int | None = None


class Seal(Call, frozen=True):
    """Refuse submissions from now on, for ever."""


class Retire(Call, frozen=True):
    """Declare a worker dead: its leases end, without spending attempts, and what it says is refused."""

    worker: str


class Consumer(msgspec.Struct, frozen=True):
    """A reader of the accepted log.

    Attributes:
        low: everything before this position is acknowledged.
        acknowledged: positions from ``low`` on that are acknowledged as well.
        state: what it saved last.
    """

    low: int
    acknowledged: list[int]
    state: Any = None
    state_ref: Ref | None = None


class OpenConsumer(Call, frozen=True):
    """Register a consumer, or find it again. Answer: `Consumer`."""

    consumer: str
    start: int | None = None


class CloseConsumer(Call, frozen=True):
    """Remove a consumer, what it saved and its batches. Answer: whether there was one.

    What the others have acknowledged is let go; without others everything that is there is kept.
    """

    consumer: str


class Ack(Call, frozen=True):
    """Acknowledge positions, and save the consumer's state in the same transaction. Answer: `Consumer`."""

    consumer: str
    positions: Many[int]
    save: bool = False
    state: Any = None
    state_ref: Ref | None = None


class Rewind(Call, frozen=True):
    """Move a consumer back to a position whose results are all still there. Answer: `Consumer`."""

    consumer: str
    position: int


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch built from accepted results.

    Attributes:
        status: ``planned``, ``ready`` or ``finished``.
        positions: what goes into it.
        plan: how it is built.
        ready: what was built.
    """

    id: str
    consumer: str
    status: str
    positions: list[int]
    plan: Ref | None = None
    ready: Ref | None = None


class PlanBatch(Call, frozen=True):
    """Record what a batch will consist of, before it is built. Answer: `Batch`."""

    batch: str
    consumer: str
    positions: Many[int]
    plan: Ref | None = None


class BatchReady(Call, frozen=True):
    """Record a batch that was built. Answer: `Batch`."""

    batch: str
    ready: Ref | None = None


class FinishBatch(Call, frozen=True):
    """Record that a batch was used: its positions are acknowledged, its payloads let go. Answer: `Batch`."""

    batch: str


class Create(Call, frozen=True):
    """Make a queue, unless there is one of that name."""


class Snapshot(Call, frozen=True):
    """Keep the queue as it is now, with its payloads, under a name. Answer: `CheckpointInfo`."""

    checkpoint: str


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A checkpoint.

    Attributes:
        queue: the queue that it is of.
        tasks: unfinished tasks in it.
        results: accepted results in it that some consumer had still to acknowledge.
    """

    name: str
    queue: str
    tasks: int
    results: int


class Fork(Call, frozen=True):
    """Make ``queue`` a new queue that begins as the checkpoint was and shares its payloads."""

    checkpoint: str


class Restore(Call, frozen=True):
    """Set ``queue`` back to one of its checkpoints. Every lease on it ends."""

    checkpoint: str


class DropCheckpoint(Call, frozen=True):
    """Let a checkpoint go. Answer: whether there was one."""

    checkpoint: str


class Trim(Call, frozen=True):
    """Forget finished tasks whose results were let go, before a position. Answer: how many.

    Their ids may be submitted again from then on.
    """

    position: int


class Query(Call, frozen=True):
    """Base of the calls that only look."""


class ReadStats(Query, frozen=True):
    """Answer: `Stats`."""


class Stats(msgspec.Struct, frozen=True):
    """A queue in figures.

    Attributes:
        positions: results accepted so far.
        undelivered: of them, those that some consumer has still to acknowledge.
        max_unfinished: most tasks pending or leased.
        max_undelivered: most results undelivered, leases counted with them.
        end: sealed, and nothing is pending or leased.
    """

    queue: str
    pending: int
    leased: int
    completed: int
    dead: int
    cancelled: int
    positions: int
    undelivered: int
    max_unfinished: int | None
    max_undelivered: int | None
    sealed: bool
    draining: bool
    end: bool
    generation: int


class TaskInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task as it stands; fields as in `Task`, `Lease` and `Receipt`.

    Attributes:
        failure: why its last attempt failed.
    """

    number: int
    id: str
    status: str
    lane: str
    stage: int
    rank: int
    attempt: int
    failures: int
    max_attempts: int
    position: int | None = None
    input: Ref | None = None
    metadata: Any = None
    worker: str | None = None
    failure: str | None = None


class ReadTask(Query, frozen=True):
    """Answer: a `TaskInfo`, or None."""

    task: str


class ListTasks(Query, frozen=True):
    """A page of tasks by number. Answer: a `TaskInfo` each."""

    status: str | None = None
    after: int = 0
    limit: int = 100


class ReadLog(Query, frozen=True):
    """Accepted results from a position on. Answer: a `Receipt` each."""

    start: int = 0
    limit: int = 100


class ReadConsumer(Query, frozen=True):
    """Answer: `Consumer`."""

    consumer: str


class ReadBatch(Query, frozen=True):
    """Answer: `Batch`."""

    batch: str


class ReadProducer(Query, frozen=True):
    """Answer: the producer's cursor, or None."""

    producer: str


class ReadCheckpoints(Query, frozen=True):
    """Answer: a `CheckpointInfo` each."""
