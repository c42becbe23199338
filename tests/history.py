"""What the users of a queue did and were told, and whether one queue can have told them so.

Every process writes JSON lines into a file of its own: ``begin`` before a call and ``end`` after its answer,
in the machine's monotonic time, which all processes share. A process that is killed leaves a call without
an end: it may have happened. A coordinator writes ``opened`` and, if it is asked to, ``answered`` for each
call. `check` reads all of it afterwards, with the queue as it ended up, and says what is impossible.

It knows nothing of `restore`, `rewind` and `trim`, which take back on purpose what was answered.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import SpillError
from spillover.pool import Ref
from spillover.queue import Client, Consumer, Coordinator, Lease, Receipt, Stats, TaskInfo
from spillover.queue import messages as m
from spillover.queue.coordinator import HANDLERS, VIEWS

AnyCall: Any = functools.reduce(operator.or_, [*HANDLERS, *VIEWS])
Attempt = tuple[int, int]
"""A task's number and one of its attempts."""
REFUSALS = {"Collected", "Conflict", "Corrupt", "InputError", "Mismatch", "NotAllowed", "Stale", "StoreFull"}
"""Errors that say that nothing happened; after any other one it may have."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line.

    Attributes:
        event: ``begin``, ``end``, ``opened`` or ``answered``.
        process: who writes, unique.
        time: of the monotonic clock, seconds; of ``answered`` when the call arrived.
        id: of the call, unique in the process.
        call: what was asked.
        answer: what was answered.
        error: class of the error that was raised instead.
        message: of that error.
        generation: of the coordinator that writes.
    """

    event: str
    process: str
    time: float
    id: int = 0
    call: AnyCall | None = None
    answer: Any = None
    error: str | None = None
    message: str | None = None
    generation: int | None = None


class Recorder:
    """Writes the history of one process into ``folder``. Threads may share it."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.process = f"{name}-{os.getpid()}"
        path = folder / f"{self.process}-{time.monotonic_ns()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._ids = itertools.count(1)

    def write(self, event: str, **fields: Any) -> None:
        fields.setdefault("time", time.monotonic())
        line = msgspec.json.encode(Event(event, self.process, **fields)) + b"\n"
        os.write(self._file, line)  # at once: a kill loses no line that was written, and tears none

    def call(self, call: m.Call, do: Callable[[m.Call], Any]) -> Any:
        """Do a call, and record it."""
        number = next(self._ids)
        self.write("begin", id=number, call=call)
        try:
            answer = do(call)
        except BaseException as error:
            self.write("end", id=number, error=type(error).__name__, message=str(error))
            raise
        self.write("end", id=number, answer=answer)
        return answer

    def opened(self, generation: int) -> None:
        """This process coordinates from now on."""
        self.write("opened", generation=generation)

    def close(self) -> None:
        os.close(self._file)


class RecordingClient(Client):
    """A client that records what it does; otherwise like `Client`."""

    def __init__(self, target: Any, queue: str, *, recorder: Recorder, **options: Any) -> None:
        super().__init__(target, queue, **options)
        self._recorder = recorder

    def _call(self, call: m.Call) -> Any:
        return self._recorder.call(call, super()._call)


def record_answers(coordinator: Coordinator, recorder: Recorder) -> None:
    """Have a coordinator record what it answers, from its opening on."""
    do, generation = coordinator.call, coordinator.owners.generation

    def call(call: m.Call) -> Any:
        arrived = time.monotonic()
        answer = do(call)
        recorder.write("answered", time=arrived, call=call, generation=generation)
        return answer

    coordinator.call = call  # type: ignore[method-assign]
    recorder.opened(generation)


@dataclass(frozen=True)
class Final:
    """A queue as it ended up."""

    stats: Stats
    tasks: list[TaskInfo]
    log: list[Receipt]
    consumers: dict[str, Consumer] = field(default_factory=dict)
    cursors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, client: Client, *, consumers: Iterable[str] = (), producers: Iterable[str] = ()) -> Final:
        tasks: list[TaskInfo] = []
        while page := client.tasks(after=tasks[-1].number if tasks else 0, limit=1000):
            tasks += page
        log: list[Receipt] = []
        while receipts := client.log(log[-1].position + 1 if log else 0, limit=1000):
            log += receipts
        return cls(
            client.stats(),
            tasks,
            log,
            {name: client.consumer(name) for name in consumers},
            {name: client.cursor(name) for name in producers},
        )


@dataclass(frozen=True)
class Done:
    """One call of a client: ``end`` is infinite and both ``answer`` and ``error`` are None if none came."""

    process: str
    call: Any
    begin: float
    end: float = math.inf
    answer: Any = None
    error: str | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and self.end < math.inf

    @property
    def maybe(self) -> bool:
        """Whether it may have happened."""
        return self.error not in REFUSALS


@dataclass
class History:
    """All calls of one queue."""

    done: list[Done]
    opened: list[Event] = field(default_factory=list)
    answered: list[Event] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, queue: str) -> History:
        events = []
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                events.append(msgspec.json.decode(line, type=Event))
        return cls.of(events, queue)

    @classmethod
    def of(cls, events: Iterable[Event], queue: str) -> History:
        found, open_ = cls([]), {}
        for event in events:
            if event.event == "begin":
                open_[event.process, event.id] = event
            elif event.event == "end":
                found.done.append(_done(open_.pop((event.process, event.id)), event))
            elif event.event in ("opened", "answered"):
                (found.opened if event.event == "opened" else found.answered).append(event)
        found.done += [Done(begun.process, begun.call, begun.time) for begun in open_.values()]
        found.done = sorted((done for done in found.done if done.call.queue == queue), key=lambda d: d.begin)
        return found

    def of_kind(self, kind: type[m.Call]) -> Iterator[Done]:
        return (done for done in self.done if isinstance(done.call, kind))


def _done(begun: Event, ended: Event) -> Done:
    call, answer = begun.call, ended.answer
    if ended.error is None:
        kind = HANDLERS.get(type(call)) or VIEWS[type(call)]
        answer = msgspec.convert(answer, kind[1])
    return Done(begun.process, call, begun.time, ended.time, answer, ended.error, ended.message or "")


def check(history: History, final: Final, read: Callable[[Ref], object] | None = None) -> list[str]:
    """What cannot be, one line each; nothing if all is well.

    Args:
        read: reads a payload, and raises an error if it cannot.
    """
    checks = (_log, _submitted, _receipts, _order, _refused, _leases, _consumers, _remembered)
    violations = [line for one in checks for line in one(history, final)]
    violations += _generations(history)
    if read is not None:
        violations += _readable(final, read)
    return violations


def _log(history: History, final: Final) -> Iterator[str]:
    """Every task is accepted once or not at all, at positions without gaps, and the counts agree."""
    positions = [receipt.position for receipt in final.log]
    if positions != [*range(len(positions))] or len(positions) != final.stats.positions:
        yield f"positions are not gapless: {_brief(positions)} of {final.stats.positions}"
    for task, times in Counter(receipt.task for receipt in final.log).items():
        if times > 1:
            yield f"task {task} was accepted {times} times"
    accepted = {receipt.task: receipt.position for receipt in final.log}
    for task in final.tasks:
        if (task.status == "completed") != (task.id in accepted) or task.position != accepted.get(task.id):
            yield f"task {task.id} is {task.status} at {task.position}, in the log at {accepted.get(task.id)}"
    counts = Counter(task.status for task in final.tasks)
    for status in ("pending", "leased", "completed", "dead", "cancelled"):
        if counts[status] != getattr(final.stats, status):
            yield f"{counts[status]} tasks are {status}, the count says {getattr(final.stats, status)}"


def _submitted(history: History, final: Final) -> Iterator[str]:
    """What was submitted is there, and nothing else; what is dead or cancelled was made so by somebody."""
    tasks = {task.id: task for task in final.tasks}
    known: set[str] = set()
    for done in history.of_kind(m.Submit):
        if done.maybe:
            known.update(task.id for task in done.call.tasks)
        for task in done.call.tasks if done.ok else ():
            if task.id not in tasks:
                yield f"task {task.id} was submitted and is lost"
    for name in tasks.keys() - known:
        yield f"task {name} was never submitted"
    ended = {f.number for done in history.of_kind(m.Fail) if done.maybe for f in done.call.failures}
    cancelled = {name for done in history.of_kind(m.Cancel) if done.maybe for name in done.call.tasks}
    for task in final.tasks:
        if task.status == "dead" and task.failures < task.max_attempts and task.number not in ended:
            yield f"task {task.id} is dead after {task.failures} failures, and nobody failed it"
        if task.status == "cancelled" and task.id not in cancelled:
            yield f"task {task.id} is cancelled, and nobody did that"


def _receipts(history: History, final: Final) -> Iterator[str]:
    """Every receipt that was given is in the log, and what is there was asked for."""
    log = {receipt.position: receipt for receipt in final.log}
    asked: set[tuple[int, int, Ref | None]] = set()
    for done in history.of_kind(m.Complete):
        if done.maybe:
            asked.update((result.number, result.attempt, result.result) for result in done.call.results)
        for receipt in done.answer if done.ok else ():
            if log.get(receipt.position) != receipt:
                yield f"the receipt of task {receipt.task} at position {receipt.position} is not in the log"
    numbers = {task.id: task.number for task in final.tasks}
    for receipt in final.log:
        if (numbers.get(receipt.task, 0), receipt.attempt, receipt.result) not in asked:
            yield f"position {receipt.position} has a result of task {receipt.task} that nobody handed in"


def _order(history: History, final: Final) -> Iterator[str]:
    """What was accepted before another call began has the lower position."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for done in history.of_kind(m.Complete):
        for receipt in done.answer if done.ok else ():
            begins[receipt.position] = min(done.begin, begins.get(receipt.position, math.inf))
            ends[receipt.position] = min(done.end, ends.get(receipt.position, math.inf))
    asked = _begun(history.of_kind(m.Complete), lambda call: call.results)
    numbers = {task.id: task.number for task in final.tasks}
    attempts = {r.position: (numbers.get(r.task, 0), r.attempt) for r in final.log}
    earliest = math.inf
    for position in sorted(begins, reverse=True):
        began = asked.get(attempts.get(position, (0, 0)), begins[position])
        if earliest < began:
            yield f"position {position} was given to a call that began after a later position was answered"
        earliest = min(earliest, ends[position])


def _refused(history: History, final: Final) -> Iterator[str]:
    """An attempt that was refused, or ended otherwise, was not accepted."""
    numbers = {task.id: task.number for task in final.tasks}
    accepted = {(numbers.get(receipt.task, 0), receipt.attempt): receipt for receipt in final.log}
    for attempt, why in _ended(history):
        if attempt in accepted:
            yield f"attempt {attempt[1]} at task {accepted[attempt].task} was {why}, and accepted"


def _ended(history: History) -> Iterator[tuple[Attempt, str]]:
    """Attempts of which nothing may be accepted, and why."""
    for done in history.done:
        call = done.call
        if isinstance(call, m.Complete) and done.error == "Stale" and len(call.results) == 1:
            yield (call.results[0].number, call.results[0].attempt), "refused"
        elif isinstance(call, m.Yield) and done.ok:
            yield from (((task.number, task.attempt), "yielded") for task in call.tasks)
        elif isinstance(call, m.Fail) and done.ok:
            yield from (((failure.number, failure.attempt), "failed") for failure in call.failures)
        elif isinstance(call, m.Release) and done.ok and done.answer == len(call.leases):
            yield from ((attempt, "released") for attempt in call.leases)


def _leases(history: History, final: Final) -> Iterator[str]:
    """No attempt is handed out twice, and each one follows from the one before it."""
    handed: dict[Attempt, tuple[Lease, Done]] = {}
    for done in history.of_kind(m.Acquire):
        for lease in done.answer.leases if done.ok else ():
            before = handed.setdefault((lease.number, lease.attempt), (lease, done))
            if before[1] is not done and (done.call.key is None or before[1].call.key != done.call.key):
                yield f"attempt {lease.attempt} at task {lease.task} was handed out twice"
    moves = _moves(history)
    retired = {done.call.worker for done in history.of_kind(m.Retire) if done.maybe}
    retried = {name for done in history.of_kind(m.Retry) if done.maybe for name in done.call.tasks}
    renewed = _renewed(history)
    for (number, attempt), (lease, done) in handed.items():
        following = handed.get((number, attempt + 1))
        if following is None or lease.task in retried:
            continue
        known = moves.get((number, attempt), [])
        for move, acknowledged in known:
            if acknowledged:
                yield from _follows(lease, move, following[0])
        if not known and lease.worker not in retired:
            held = max(done.begin, renewed.get((number, attempt), 0.0)) + lease.seconds
            if following[1].end < held:
                yield f"attempt {attempt} at task {lease.task} ended {held - following[1].end:.3f} s early"
            if following[0].failures != lease.failures + 1:
                yield f"attempt {attempt} at task {lease.task} ran out and was not counted"


def _moves(history: History) -> dict[Attempt, list[tuple[Any, bool]]]:
    """What was asked for each attempt that returns its task, and whether that was acknowledged."""
    found: defaultdict[Attempt, list[tuple[Any, bool]]] = defaultdict(list)
    for done in history.done:
        if not done.maybe:
            continue
        if isinstance(done.call, m.Yield):
            for task in done.call.tasks:
                found[task.number, task.attempt].append((task, done.ok))
        elif isinstance(done.call, m.Fail):
            for failure in done.call.failures:
                found[failure.number, failure.attempt].append((failure, done.ok))
        elif isinstance(done.call, m.Release):
            for attempt in done.call.leases:
                found[attempt].append((None, done.ok and done.answer == len(done.call.leases)))
    return found


def _follows(lease: Lease, move: Any, following: Lease) -> Iterator[str]:
    """Whether the next attempt begins as the move says."""
    failures = lease.failures + isinstance(move, m.Failure)
    start = move if isinstance(move, m.Yielded) else lease
    wanted = (start.input, start.metadata, start.stage, start.rank, failures)
    found = (following.input, following.metadata, following.stage, following.rank, following.failures)
    if wanted != found:
        what = "released" if move is None else type(move).__name__.lower()
        yield f"attempt {following.attempt} at task {lease.task} began otherwise than the one before ({what})"


def _renewed(history: History) -> dict[Attempt, float]:
    """When each attempt's last successful renewal began."""
    found: dict[Attempt, float] = {}
    for done in history.of_kind(m.Renew):
        for attempt, current in zip(done.call.leases, done.answer, strict=True) if done.ok else ():
            if current:
                found[attempt] = max(done.begin, found.get(attempt, 0.0))
    return found


def _consumers(history: History, final: Final) -> Iterator[str]:
    """What was acknowledged stays so."""
    for done in history.of_kind(m.Ack):
        consumer = final.consumers.get(done.call.consumer)
        if done.ok and consumer is not None:
            lost = {p for p in done.call.positions if p >= consumer.low} - {*consumer.acknowledged}
            if lost:
                yield f"consumer {done.call.consumer} acknowledged {_brief(sorted(lost))}, which is forgotten"


def _remembered(history: History, final: Final) -> Iterator[str]:
    """Cursors, saved states, cancellations and the seal are as the last acknowledged call left them."""
    for name, cursor in final.cursors.items():
        moves = [done for done in history.of_kind(m.Submit) if done.call.producer == name]
        if not _last(moves, lambda call: call.cursor, cursor, None):
            yield f"the cursor of producer {name} is {cursor}, which is not the last that was committed"
    for name, consumer in final.consumers.items():
        saves = [done for done in history.of_kind(m.Ack) if done.call.consumer == name and done.call.save]
        if not _last(saves, lambda call: (call.state, call.state_ref), (consumer.state, consumer.state_ref)):
            yield f"the state of consumer {name} is not the last that was saved"
    status = {task.id: task.status for task in final.tasks}
    for done in history.of_kind(m.Cancel):
        for name in done.call.tasks if done.ok and done.answer == len(done.call.tasks) else ():
            if status.get(name) != "cancelled":
                yield f"task {name} was cancelled, and is {status.get(name)}"
    if any(done.ok for done in history.of_kind(m.Seal)) and not final.stats.sealed:
        yield "the queue was sealed, and is not"


def _last(moves: Sequence[Done], value: Callable[[Any], Any], found: Any, first: Any = (None, None)) -> bool:
    """Whether ``found`` is what one of the moves left that no acknowledged one certainly came after."""
    began = max((done.begin for done in moves if done.ok), default=-math.inf)
    possible = [done for done in moves if done.maybe and done.end >= began]
    if not any(done.ok for done in moves) and found == first:
        return True
    return any(value(done.call) == found for done in possible)


def _generations(history: History) -> Iterator[str]:
    """One coordinator at a time, each with a larger generation than the ones before it."""
    opened = sorted(history.opened, key=lambda event: event.time)
    for before, after in itertools.pairwise(opened):
        if (before.generation or 0) >= (after.generation or 0):
            yield f"generation {after.generation} was opened after {before.generation}"
    for event in history.answered:
        if any(o.time < event.time and (o.generation or 0) > (event.generation or 0) for o in opened):
            yield f"generation {event.generation} answered a {type(event.call).__name__} after a takeover"
    latest, seen = 0, [done for done in history.of_kind(m.ReadStats) if done.ok]
    ends = sorted(seen, key=lambda done: done.end)
    index = 0
    for done in seen:  # in the order of their begins
        while index < len(ends) and ends[index].end < done.begin:
            latest = max(latest, ends[index].answer.generation)
            index += 1
        if done.answer.generation < latest:
            yield f"generation {done.answer.generation} answered after generation {latest}"


def _readable(final: Final, read: Callable[[Ref], object]) -> Iterator[str]:
    """What somebody still needs can be read."""
    wanted = [(f"the input of task {task.id}", task.input) for task in final.tasks]
    for receipt in final.log:
        consumers = final.consumers.values()
        needed = [
            c for c in consumers if c.low <= receipt.position and receipt.position not in c.acknowledged
        ]
        if needed or not consumers:
            wanted.append((f"the result at position {receipt.position}", receipt.result))
    wanted += [(f"the state of consumer {name}", c.state_ref) for name, c in final.consumers.items()]
    for what, ref in wanted:
        if ref is not None:
            try:
                read(ref)
            except SpillError as error:
                yield f"{what} cannot be read: {error}"


def _begun(calls: Iterable[Done], items: Callable[[Any], Iterable[Any]]) -> dict[Attempt, float]:
    """When each attempt was first named."""
    found: dict[Attempt, float] = {}
    for done in calls:
        for item in items(done.call):
            key = (item.number, item.attempt)
            found[key] = min(done.begin, found.get(key, math.inf))
    return found


def _brief(values: Sequence[int]) -> str:
    return f"{[*values[:8]]}{'...' if len(values) > 8 else ''}"
