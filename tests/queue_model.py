"""A queue as it should be, in plain Python: no database, no numbers, no sharing.

A call is a message, as for the coordinator; it changes the model and is answered, or raises and changes
nothing. Leases name their tasks by numbers that the coordinator gave: `Model.bind` tells the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spillover.errors import Collected, Conflict, Full, InputError, NotAllowed, Stale, Superseded
from spillover.pool import Ref
from spillover.queue import Acquired, Batch, CheckpointInfo, Consumer, Lease, Receipt, Submitted, Task
from spillover.queue import messages as m


@dataclass
class Row:
    task: Task
    turn: int
    input: Ref | None
    metadata: Any
    stage: int
    rank: int
    status: str = "pending"
    attempt: int = 0
    failures: int = 0
    worker: str | None = None
    failure: str | None = None
    position: int | None = None
    number: int | None = None
    deadline: float = math.inf

    def end(self, status: str) -> None:
        self.status, self.deadline = status, math.inf
        self.worker = self.worker if status == "completed" else None


@dataclass
class Reading:
    low: int
    acked: set[int] = field(default_factory=set)
    state: Any = None
    ref: Ref | None = None

    def done(self, position: int) -> bool:
        return position < self.low or position in self.acked


@dataclass
class Queue:
    rows: dict[str, Row] = field(default_factory=dict)
    log: dict[int, Receipt] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    positions: int = 0
    sealed: bool = False
    unfinished: int | None = None
    undelivered: int | None = None
    cursors: dict[str, Any] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    consumers: dict[str, Reading] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)

    def of(self, status: str) -> list[Row]:
        return [row for row in self.rows.values() if row.status == status]

    def current(self, number: int, attempt: int) -> Row | None:
        found = [row for row in self.of("leased") if (row.number, row.attempt) == (number, attempt)]
        return found[0] if found else None

    def require(self, number: int, attempt: int) -> Row:
        if (row := self.current(number, attempt)) is None:
            raise Stale("not current")
        return row

    def reader(self, name: str) -> Reading:
        if name not in self.consumers:
            raise InputError("no consumer")
        return self.consumers[name]

    def kept_from(self) -> int:
        first = self.positions
        while first - 1 in self.held:
            first -= 1
        return first

    def copied(self) -> Queue:
        """What a checkpoint keeps."""
        new = copy.deepcopy(self)
        new.rows = {
            row.task.id: row
            for row in new.rows.values()
            if row.status in ("pending", "leased", "dead") or row.position in self.held
        }
        for row in new.rows.values():
            row.number, row.worker = None, None
            if row.status == "leased":
                row.end("pending")
        new.log = {position: new.log[position] for position in self.held}
        new.batches = {name: batch for name, batch in new.batches.items() if batch.status != "finished"}
        return new

    def payloads(self) -> Iterator[Ref | None]:
        yield from (row.input for row in self.rows.values())
        yield from (self.log[position].result for position in self.held)
        yield from (reading.ref for reading in self.consumers.values())
        for batch in self.batches.values():
            yield from (batch.plan, batch.ready)


class Model:
    """All queues of a pool."""

    def __init__(self, lease_seconds: float) -> None:
        self.seconds, self.now, self.turn = lease_seconds, 0.0, 0
        self.queues: dict[str, Queue] = {}
        self.checkpoints: dict[str, tuple[str, Queue]] = {}
        self.answers: dict[tuple[str | None, str], tuple[m.Call, Any]] = {}
        self.links: dict[Ref, Ref] = {}
        self.gone: set[Ref] = set()

    def expire(self) -> None:
        """What ran out is over for whoever looks."""
        for row in [row for queue in self.queues.values() for row in queue.of("leased")]:
            if row.deadline < self.now:
                self._fail(row, f"the lease of worker {row.worker} ran out", True)

    def call(self, call: m.Call) -> Any:
        self.expire()
        before = copy.deepcopy((self.queues, self.checkpoints))
        try:
            return self._once(call)
        except Exception:
            self.queues, self.checkpoints = before
            raise

    def restart(self) -> None:
        for queue in self.queues.values():
            for row in queue.of("leased"):
                row.deadline = self.now + self.seconds

    def bind(self, queue: str, leases: list[Lease]) -> None:
        for lease in leases:
            row = self.queues[queue].rows[lease.task]
            assert row.number in (None, lease.number)
            row.number = lease.number

    def needed(self) -> set[Ref]:
        """What must not be collected."""
        queues = [*self.queues.values(), *(queue for _, queue in self.checkpoints.values())]
        found = {ref for queue in queues for ref in queue.payloads() if ref is not None}
        todo = [*found]
        while todo:
            if (below := self.links.get(todo.pop())) is not None and below not in found:
                found.add(below)
                todo.append(below)
        return found

    def _once(self, call: m.Call) -> Any:
        if not isinstance(call, (m.Create, m.Fork)) and call.queue not in self.queues:
            raise InputError("no queue")
        key = (None if isinstance(call, (m.Create, m.Fork)) else call.queue, call.key or "")
        if call.key is not None and key in self.answers:
            asked, answer = self.answers[key]
            if asked != call:
                raise Conflict("another request")
            return answer
        queue = self.queues.get(call.queue, Queue())
        answer = getattr(self, type(call).__name__)(queue, call)
        if call.key is not None and not (isinstance(answer, m.Acquired) and not answer.leases):
            self.answers[key] = (call, answer)
        return answer

    def _own(self, *refs: Ref | None) -> None:
        if self.gone & {*refs}:
            raise Collected("gone")

    def _next(self) -> int:
        self.turn += 1
        return self.turn

    def _fail(self, row: Row, reason: str, retryable: bool) -> bool:
        row.failures, row.failure = row.failures + 1, reason
        row.end("pending" if retryable and row.failures < row.task.max_attempts else "dead")
        return row.status == "dead"

    def Create(self, queue: Queue, call: m.Create) -> None:
        self.queues.setdefault(call.queue, Queue())

    def Submit(self, queue: Queue, call: m.Submit) -> Submitted:
        new = []
        for task in call.tasks:
            if (known := queue.rows.get(task.id)) is None:
                row = Row(task, self._next(), task.input, task.metadata, task.stage, task.rank)
                queue.rows[task.id] = row
                new.append(row)
            elif known.task != task:
                raise Conflict("other content")
        if new and queue.sealed:
            raise NotAllowed("sealed")
        if new and queue.unfinished and len(queue.of("pending") + queue.of("leased")) > queue.unfinished:
            raise InputError("never") if len(new) > queue.unfinished else Full("not now")
        self._own(*(row.input for row in new))
        if call.producer is not None:
            queue.cursors[call.producer] = call.cursor
        return Submitted(len(new))

    def Acquire(self, queue: Queue, call: m.Acquire) -> Acquired:
        if call.limit < 1:
            raise InputError("limit")
        if call.worker in queue.retired:
            raise Superseded("retired")
        room = call.limit
        if queue.undelivered is not None and queue.of("pending"):
            room = min(room, queue.undelivered - len(queue.held) - len(queue.of("leased")))
            if room < 1:
                return Acquired([], "backpressured")
        rows = [row for row in queue.of("pending") if row.task.lane == call.lane]
        rows = [row for row in rows if row.task.id.startswith(call.prefix)]
        rows = [row for row in rows if call.tasks is None or row.task.id in call.tasks]
        rows = sorted(rows, key=lambda row: (row.stage, row.rank, row.turn))[:room]
        if not rows:
            over = queue.sealed and not queue.of("pending") and not queue.of("leased")
            return Acquired([], "end" if over else "empty")
        for row in rows:
            row.status, row.worker, row.attempt = "leased", call.worker, row.attempt + 1
            row.deadline = self.now + self.seconds
        return Acquired([self._lease(row) for row in rows], "acquired")

    def _lease(self, row: Row) -> Lease:
        begin = (row.number or 0, row.attempt, row.task.id, row.worker or "", row.input, row.metadata)
        return Lease(*begin, row.stage, row.rank, row.failures, self.seconds)

    def Renew(self, queue: Queue, call: m.Renew) -> list[bool]:
        found = [queue.current(*lease) for lease in call.leases]
        for row in found:
            if row is not None:
                row.deadline = self.now + self.seconds
        return [row is not None for row in found]

    def Complete(self, queue: Queue, call: m.Complete) -> list[Receipt]:
        receipts: dict[int, Receipt] = {}
        position = queue.positions
        for done in call.results:
            if (row := queue.current(done.number, done.attempt)) is None:
                receipts[done.number] = self._accepted(queue, done)
        if len({done.number for done in call.results}) != len(call.results):
            raise InputError("twice")
        for done in call.results:
            if (row := queue.current(done.number, done.attempt)) is not None:
                row.end("completed")
                row.position, row.input = position, None
                told = (position, row.task.id, row.attempt, row.worker or "", done.result, done.metadata)
                queue.log[position] = receipts[done.number] = Receipt(*told)
                queue.held.add(position)
                self._own(done.result)
                position += 1
        queue.positions = position
        return [receipts[done.number] for done in call.results]

    def _accepted(self, queue: Queue, done: m.Completion) -> Receipt:
        for row in queue.of("completed"):
            receipt = queue.log[row.position or 0]
            if (row.number, receipt.attempt) == (done.number, done.attempt):
                if (receipt.result, receipt.metadata) != (done.result, done.metadata):
                    raise Conflict("another result")
                return receipt
        raise Stale("not current")

    def _rows(self, queue: Queue, items: list[Any]) -> list[Row]:
        rows = [queue.require(item.number, item.attempt) for item in items]
        if len({id(row) for row in rows}) != len(rows):
            raise InputError("twice")
        return rows

    def Yield(self, queue: Queue, call: m.Yield) -> int:
        for row, task in zip(self._rows(queue, call.tasks), call.tasks, strict=True):
            self._own(task.input)
            row.end("pending")
            row.turn, row.input, row.metadata = self._next(), task.input, task.metadata
            row.stage, row.rank = task.stage, task.rank
        return len(call.tasks)

    def Release(self, queue: Queue, call: m.Release) -> int:
        rows = [row for lease in dict.fromkeys(call.leases) if (row := queue.current(*lease)) is not None]
        for row in rows:
            row.end("pending")
        return len(rows)

    def Fail(self, queue: Queue, call: m.Fail) -> int:
        pairs = zip(self._rows(queue, call.failures), call.failures, strict=True)
        return sum(self._fail(row, why.reason, why.retryable) for row, why in pairs)

    def Cancel(self, queue: Queue, call: m.Cancel) -> int:
        rows = [queue.rows[name] for name in dict.fromkeys(call.tasks) if name in queue.rows]
        rows = [row for row in rows if row.status in ("pending", "leased", "dead")]
        for row in rows:
            row.end("cancelled")
            row.input = None
        return len(rows)

    def Retry(self, queue: Queue, call: m.Retry) -> int:
        rows = [row for row in queue.of("dead") if row.task.id in call.tasks]
        for row in rows:
            row.status, row.failures, row.failure = "pending", 0, None
        return len(rows)

    def Limit(self, queue: Queue, call: m.Limit) -> None:
        if 0 in (call.unfinished, call.undelivered):
            raise InputError("below one")
        queue.unfinished, queue.undelivered = call.unfinished, call.undelivered

    def Seal(self, queue: Queue, call: m.Seal) -> None:
        queue.sealed = True

    def Retire(self, queue: Queue, call: m.Retire) -> int:
        queue.retired.add(call.worker)
        rows = [row for row in queue.of("leased") if row.worker == call.worker]
        for row in rows:
            row.end("pending")
        return len(rows)

    def OpenConsumer(self, queue: Queue, call: m.OpenConsumer) -> Consumer:
        if call.consumer not in queue.consumers:
            start = queue.kept_from() if call.start is None else call.start
            if not 0 <= start <= queue.positions:
                raise InputError("start")
            if start < queue.kept_from():
                raise Collected("let go")
            queue.consumers[call.consumer] = Reading(start)
        return self.consumer(queue, call.consumer)

    def consumer(self, queue: Queue, name: str) -> Consumer:
        reading = queue.reader(name)
        return Consumer(reading.low, sorted(reading.acked), reading.state, reading.ref)

    def Ack(self, queue: Queue, call: m.Ack) -> Consumer:
        reading = queue.reader(call.consumer)
        self._ack(queue, reading, call.positions)
        if call.save:
            self._own(call.state_ref)
            reading.state, reading.ref = call.state, call.state_ref
        return self.consumer(queue, call.consumer)

    def _positions(self, queue: Queue, positions: list[int]) -> None:
        if not all(0 <= position < queue.positions for position in positions):
            raise InputError("positions")

    def _ack(self, queue: Queue, reading: Reading, positions: list[int]) -> None:
        self._positions(queue, positions)
        reading.acked |= {position for position in positions if position >= reading.low}
        while reading.low in reading.acked:
            reading.acked.discard(reading.low)
            reading.low += 1
        for position in positions:
            if all(other.done(position) for other in queue.consumers.values()):
                queue.held.discard(position)

    def Rewind(self, queue: Queue, call: m.Rewind) -> Consumer:
        reading = queue.reader(call.consumer)
        if not 0 <= call.position <= reading.low:
            raise InputError("not behind")
        if call.position < queue.kept_from():
            raise Collected("let go")
        reading.low, reading.acked = call.position, set()
        return self.consumer(queue, call.consumer)

    def PlanBatch(self, queue: Queue, call: m.PlanBatch) -> Batch:
        queue.reader(call.consumer)
        if (known := queue.batches.get(call.batch)) is not None:
            if (known.positions, known.plan) != (call.positions, call.plan):
                raise Conflict("planned otherwise")
            return known
        self._positions(queue, call.positions)
        self._own(call.plan)
        queue.batches[call.batch] = Batch(call.batch, call.consumer, "planned", call.positions, call.plan)
        return queue.batches[call.batch]

    def BatchReady(self, queue: Queue, call: m.BatchReady) -> Batch:
        batch = self.batch(queue, call.batch)
        if batch.status == "planned":
            self._own(call.ready)
            queue.batches[call.batch] = msgspec.structs.replace(batch, status="ready", ready=call.ready)
        elif batch.status == "ready" and batch.ready != call.ready:
            raise Conflict("another payload")
        return queue.batches[call.batch]

    def batch(self, queue: Queue, name: str) -> Batch:
        if name not in queue.batches:
            raise InputError("no batch")
        return queue.batches[name]

    def FinishBatch(self, queue: Queue, call: m.FinishBatch) -> Batch:
        batch = self.batch(queue, call.batch)
        if batch.status == "planned":
            raise NotAllowed("not ready")
        if batch.status == "ready":
            self._ack(queue, queue.reader(batch.consumer), batch.positions)
            done = msgspec.structs.replace(batch, status="finished", plan=None, ready=None)
            queue.batches[call.batch] = done
        return queue.batches[call.batch]

    def Snapshot(self, queue: Queue, call: m.Snapshot) -> CheckpointInfo:
        if call.checkpoint in self.checkpoints:
            raise NotAllowed("exists")
        self.checkpoints[call.checkpoint] = (call.queue, queue.copied())
        return self.info(call.checkpoint)

    def info(self, name: str) -> CheckpointInfo:
        parent, kept = self.checkpoints[name]
        return CheckpointInfo(name, parent, len(kept.of("pending") + kept.of("dead")), len(kept.log))

    def _checkpoint(self, name: str) -> Queue:
        if name not in self.checkpoints:
            raise InputError("no checkpoint")
        return self.checkpoints[name][1].copied()

    def Fork(self, queue: Queue, call: m.Fork) -> None:
        kept = self._checkpoint(call.checkpoint)
        if call.queue in self.queues:
            raise NotAllowed("exists")
        self.queues[call.queue] = kept

    def Restore(self, queue: Queue, call: m.Restore) -> None:
        kept = self._checkpoint(call.checkpoint)
        kept.retired |= queue.retired
        kept.unfinished, kept.undelivered = queue.unfinished, queue.undelivered
        self.queues[call.queue] = kept

    def DropCheckpoint(self, queue: Queue, call: m.DropCheckpoint) -> bool:
        return self.checkpoints.pop(call.checkpoint, None) is not None

    def Trim(self, queue: Queue, call: m.Trim) -> int:
        gone = {position for position in queue.log if position < call.position and position not in queue.held}
        queue.log = {position: queue.log[position] for position in queue.log if position not in gone}
        before = len(queue.rows)
        queue.rows = {name: row for name, row in queue.rows.items() if row.position not in gone}
        return before - len(queue.rows)
