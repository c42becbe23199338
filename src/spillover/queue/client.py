"""A queue as producers, workers and consumers use it; the same over every transport."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from spillover.errors import Busy, Full, InputError, Unknown
from spillover.pool import Ref
from spillover.pool.writer import settle
from spillover.queue import messages as m
from spillover.queue.coordinator import Coordinator
from spillover.queue.messages import (
    Acquired,
    Batch,
    CheckpointInfo,
    Completion,
    Consumer,
    Failure,
    Lease,
    Receipt,
    Stats,
    Submitted,
    Task,
    TaskInfo,
    Yielded,
)
from spillover.queue.transport import HttpTransport, LocalTransport, RayTransport, Transport

__all__ = ["Client"]

TIMEOUT = 60.0
TRY = 10.0
"""The longest that one try waits for its answer, in seconds."""
_NATURAL = (m.Complete, m.Renew, m.Release, m.Seal, m.Create, m.PlanBatch, m.BatchReady, m.Query)
"""Calls whose repeat is recognised by what they say, so that they need no key."""
T = TypeVar("T")


class Client:
    """One queue of a coordinator. Threads may share it.

    A call that gets no answer is repeated, under the same key, until ``timeout``: it happens once. Payloads
    that a call handed over are settled with this process's pool writers.

    Args:
        target: a `Coordinator`, a Ray actor, the address of ``spill queue serve``, or several addresses,
            of which whichever answers is used.
        queue: the queue's name.
        token: for HTTP.
        timeout: seconds after which a call without an answer is given up.
    """

    def __init__(
        self, target: Any, queue: str = "default", *, token: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        self.queue = queue
        self.timeout = timeout
        self._transports = _transports(target, token)
        self._used = 0
        self._name = secrets.token_hex(8)
        self._count = itertools.count()

    def create(self) -> None:
        """Make the queue, unless it is there."""
        self._call(m.Create(queue=self.queue))

    def submit(
        self,
        tasks: Sequence[Task],
        *,
        producer: str | None = None,
        cursor: Any = None,
        key: str | None = None,
        wait: float = 0.0,
    ) -> Submitted:
        """Add tasks; move the producer's cursor in the same transaction. Again with the same content is fine.

        Args:
            wait: most seconds to wait for room in a queue that is full.

        Raises:
            Conflict: a task of that id was submitted with other content; nothing was added.
            NotAllowed: the queue is sealed.
            Full: the queue has no room for them; nothing was added.
        """
        call = m.Submit(queue=self.queue, key=key, tasks=[*tasks], producer=producer, cursor=cursor)
        turns = _turns(wait)
        while True:
            try:
                answer: Submitted = self._call(call)
                break
            except Full:
                if not next(turns):
                    raise
        settle(task.input for task in tasks)
        return answer

    def acquire(
        self,
        worker: str,
        limit: int = 1,
        *,
        lane: str = "",
        prefix: str = "",
        tasks: Sequence[str] | None = None,
        key: str | None = None,
        wait: float = 0.0,
    ) -> Acquired:
        """Lease up to ``limit`` tasks in the queue's order: stage, then rank, then first in, first out.

        Args:
            wait: most seconds to wait for the first of them, unless nothing will come any more.

        Raises:
            Superseded: the worker was retired.
        """
        only = None if tasks is None else [*tasks]
        call = m.Acquire(
            queue=self.queue, key=key, worker=worker, limit=limit, lane=lane, prefix=prefix, tasks=only
        )
        turns = _turns(wait)
        while True:
            answer: Acquired = self._call(call)
            if answer.leases or answer.status == "end" or not next(turns):
                return answer

    def renew(self, leases: Iterable[Lease]) -> list[bool]:
        """Extend leases by their full time; says for each whether it is still held."""
        answer: list[bool] = self._call(m.Renew(queue=self.queue, leases=_attempts(leases)))
        return answer

    def complete(self, lease: Lease, result: Ref | None = None, *, metadata: Any = None) -> Receipt:
        """Have a result accepted. Again with the same result gets the same receipt.

        Raises:
            Stale: the lease ran out, or the task ended; the message says what became of it.
            Conflict: the attempt was accepted with another result.
        """
        return self.complete_many([Completion(lease.number, lease.attempt, result, metadata)])[0]

    def complete_many(self, results: Sequence[Completion]) -> list[Receipt]:
        """Like `complete` for several, all or none."""
        answer: list[Receipt] = self._call(m.Complete(queue=self.queue, results=[*results]))
        settle(done.result for done in results)
        return answer

    def yield_tasks(self, tasks: Sequence[Yielded], *, key: str | None = None) -> int:
        """Return tasks with new inputs, for anybody to continue; all or none. Spends no attempt.

        Raises:
            Stale: one is not held any more.
        """
        answer: int = self._call(m.Yield(queue=self.queue, key=key, tasks=[*tasks]))
        settle(task.input for task in tasks)
        return answer

    def release(self, leases: Iterable[Lease]) -> int:
        """Return tasks as they were; those not held any more are skipped. Spends no attempt."""
        answer: int = self._call(m.Release(queue=self.queue, leases=_attempts(leases)))
        return answer

    def fail(self, lease: Lease, reason: str, *, retryable: bool = True, key: str | None = None) -> bool:
        """Report a failed attempt; says whether the task is dead now.

        Raises:
            Stale: the lease is not held any more.
        """
        failure = Failure(lease.number, lease.attempt, reason, retryable)
        return bool(self._call(m.Fail(queue=self.queue, key=key, failures=[failure])))

    def cancel(self, tasks: Sequence[str], *, key: str | None = None) -> int:
        """End tasks that are not finished; returns how many there were."""
        answer: int = self._call(m.Cancel(queue=self.queue, key=key, tasks=[*tasks]))
        return answer

    def retry(self, tasks: Sequence[str], *, key: str | None = None) -> int:
        """Make dead tasks pending again; returns how many there were."""
        answer: int = self._call(m.Retry(queue=self.queue, key=key, tasks=[*tasks]))
        return answer

    def limit(self, *, unfinished: int | None = None, undelivered: int | None = None) -> None:
        """Bound how much the queue may hold, for ever or until the next call of this; None for no bound.

        Args:
            unfinished: most tasks pending or leased. `submit` is refused with `Full` beyond it.
            undelivered: most results that a consumer has still to acknowledge, leases counted with them.
                `acquire` gets nothing beyond it, and says ``backpressured``. Let it be more than a batch.
        """
        self._call(m.Limit(queue=self.queue, unfinished=unfinished, undelivered=undelivered))

    def seal(self) -> None:
        """Take no more tasks, for ever."""
        self._call(m.Seal(queue=self.queue))

    def retire(self, worker: str, *, key: str | None = None) -> int:
        """Declare a worker dead; returns how many leases it held. They go back without spending attempts."""
        answer: int = self._call(m.Retire(queue=self.queue, key=key, worker=worker))
        return answer

    def stats(self) -> Stats:
        """The queue in figures."""
        answer: Stats = self._call(m.ReadStats(queue=self.queue))
        return answer

    def task(self, task: str) -> TaskInfo | None:
        """A task as it stands."""
        answer: TaskInfo | None = self._call(m.ReadTask(queue=self.queue, task=task))
        return answer

    def tasks(self, status: str | None = None, *, after: int = 0, limit: int = 100) -> list[TaskInfo]:
        """A page of tasks by number; the next begins after the last one's."""
        call = m.ListTasks(queue=self.queue, status=status, after=after, limit=limit)
        answer: list[TaskInfo] = self._call(call)
        return answer

    def log(self, start: int = 0, limit: int = 100) -> list[Receipt]:
        """Accepted results from position ``start`` on."""
        answer: list[Receipt] = self._call(m.ReadLog(queue=self.queue, start=start, limit=limit))
        return answer

    def cursor(self, producer: str) -> Any:
        """The cursor that a producer committed last; None if it never did."""
        return self._call(m.ReadProducer(queue=self.queue, producer=producer))

    def open_consumer(self, consumer: str, *, start: int | None = None) -> Consumer:
        """Register a consumer, or find it again.

        Args:
            start: where it begins; by default where everything from there on is still there.

        Raises:
            Collected: a result from ``start`` on was let go.
        """
        call = m.OpenConsumer(queue=self.queue, consumer=consumer, start=start)
        answer: Consumer = self._call(call)
        return answer

    def close_consumer(self, consumer: str, *, key: str | None = None) -> bool:
        """Remove a consumer, what it saved and its batches; says whether there was one."""
        return bool(self._call(m.CloseConsumer(queue=self.queue, key=key, consumer=consumer)))

    def consumer(self, consumer: str) -> Consumer:
        """Where a consumer is, and what it saved."""
        answer: Consumer = self._call(m.ReadConsumer(queue=self.queue, consumer=consumer))
        return answer

    def ack(self, consumer: str, positions: Sequence[int]) -> Consumer:
        """Acknowledge positions, in any order; a result that every consumer acknowledged is let go."""
        answer: Consumer = self._call(m.Ack(queue=self.queue, consumer=consumer, positions=[*positions]))
        return answer

    def save(
        self, consumer: str, state: Any, *, payload: Ref | None = None, positions: Sequence[int] = ()
    ) -> Consumer:
        """Save a consumer's state, and acknowledge positions in the same transaction."""
        answer: Consumer = self._call(
            m.Ack(
                queue=self.queue,
                consumer=consumer,
                positions=[*positions],
                save=True,
                state=state,
                state_ref=payload,
            )
        )
        settle([payload])
        return answer

    def rewind(self, consumer: str, position: int, *, key: str | None = None) -> Consumer:
        """Move a consumer back, to read and acknowledge from ``position`` on again.

        Raises:
            Collected: a result from there on was let go.
        """
        call = m.Rewind(queue=self.queue, key=key, consumer=consumer, position=position)
        answer: Consumer = self._call(call)
        return answer

    def plan_batch(
        self, batch: str, consumer: str, positions: Sequence[int], plan: Ref | None = None
    ) -> Batch:
        """Record what a batch will consist of, before it is built. The same again is fine."""
        call = m.PlanBatch(
            queue=self.queue, batch=batch, consumer=consumer, positions=[*positions], plan=plan
        )
        answer: Batch = self._call(call)
        settle([plan])
        return answer

    def batch_ready(self, batch: str, ready: Ref | None = None) -> Batch:
        """Record a batch that was built. The same again is fine."""
        answer: Batch = self._call(m.BatchReady(queue=self.queue, batch=batch, ready=ready))
        settle([ready])
        return answer

    def batch(self, batch: str) -> Batch:
        """A batch as it stands."""
        answer: Batch = self._call(m.ReadBatch(queue=self.queue, batch=batch))
        return answer

    def finish_batch(self, batch: str) -> Batch:
        """Record that a batch was used: its positions are acknowledged, its payloads let go."""
        answer: Batch = self._call(m.FinishBatch(queue=self.queue, batch=batch))
        return answer

    def snapshot(self, checkpoint: str, *, key: str | None = None) -> CheckpointInfo:
        """Keep the queue as it is now, with its payloads."""
        call = m.Snapshot(queue=self.queue, key=key, checkpoint=checkpoint)
        answer: CheckpointInfo = self._call(call)
        return answer

    def checkpoints(self) -> list[CheckpointInfo]:
        """The queue's checkpoints, oldest first."""
        answer: list[CheckpointInfo] = self._call(m.ReadCheckpoints(queue=self.queue))
        return answer

    def fork(self, checkpoint: str, queue: str, *, key: str | None = None) -> Client:
        """Begin a new queue as a checkpoint was; returns a client for it."""
        self._call(m.Fork(queue=queue, key=key, checkpoint=checkpoint))
        return self.on(queue)

    def restore(self, checkpoint: str, *, key: str | None = None) -> None:
        """Set this queue back to a checkpoint; every lease on it ends."""
        self._call(m.Restore(queue=self.queue, key=key, checkpoint=checkpoint))

    def drop_checkpoint(self, checkpoint: str, *, key: str | None = None) -> bool:
        """Let a checkpoint go; says whether there was one."""
        return bool(self._call(m.DropCheckpoint(queue=self.queue, key=key, checkpoint=checkpoint)))

    def trim(self, position: int, *, key: str | None = None) -> int:
        """Forget finished tasks before ``position`` whose results were let go; returns how many."""
        answer: int = self._call(m.Trim(queue=self.queue, key=key, position=position))
        return answer

    def on(self, queue: str) -> Client:
        """A client for another queue of the same coordinator, over the same connections."""
        other = object.__new__(Client)
        other.__dict__.update(self.__dict__)
        other.queue = queue
        return other

    def close(self) -> None:
        """Let the connections go."""
        for transport in self._transports:
            transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, call: m.Call) -> Any:
        """Send a call until it is answered, or the time is up. A coordinator that is busy is asked again."""
        if call.key is None and self._lossy and not _natural(call):
            call = msgspec.structs.replace(call, key=f"{self._name}:{next(self._count)}")
        end, turns = time.monotonic() + self.timeout, _turns(self.timeout)
        while True:
            left = end - time.monotonic()
            transport = self._transports[self._used % len(self._transports)]
            try:
                return transport.call(call, max(0.05, min(left, TRY)))
            except (Busy, Unknown) as error:
                unheard = isinstance(error, Unknown)
                if (unheard and not transport.lossy) or not next(turns):
                    raise type(error)(f"{error}; given up after {self.timeout:g} s") from None
            self._used += unheard

    @property
    def _lossy(self) -> bool:
        return any(transport.lossy for transport in self._transports)


def _turns(seconds: float) -> Iterator[bool]:
    """Sleep ever longer, but not beyond ``seconds`` in all; each time say whether to try again."""
    end, pause = time.monotonic() + seconds, 0.02
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, pause * (0.5 + random.random())))
        yield True
        pause = min(1.0, pause * 2)
    while True:
        yield False


def _natural(call: m.Call) -> bool:
    """Whether a repeat changes nothing, even one that comes after later calls."""
    if isinstance(call, m.Submit):
        return call.producer is None  # else it would set the cursor back
    return isinstance(call, _NATURAL)


def _attempts(leases: Iterable[Lease]) -> list[tuple[int, int]]:
    return [(lease.number, lease.attempt) for lease in leases]


def _transports(target: Any, token: str | None) -> list[Transport]:
    if isinstance(target, Coordinator):
        return [LocalTransport(target)]
    if isinstance(target, str):
        return [HttpTransport(target, token)]
    if isinstance(target, (list, tuple)) and target:
        return [HttpTransport(address, token) for address in target]
    if hasattr(target, "call"):
        return [RayTransport(target)]
    raise InputError(f"{target!r} is no coordinator", hint="a Coordinator, http://HOST:PORT, or a Ray actor")
