"""What every job shares: where its state lives, how it is owned, how it ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from spillover.engine import Placement, Plan
from spillover.engine import Work as Asked
from spillover.engine.protocol import Kind, Numerics
from spillover.errors import InputError
from spillover.jobs.events import Events
from spillover.jobs.interrupts import Abandoned, Ending, Interrupts
from spillover.jobs.runs import RUNS, JobFile, Run, hardware, run_id
from spillover.models import LoraConfig
from spillover.sizes import parse_size
from spillover.state import LEASE_SECONDS, Control, Identity, Owned, Owner, State
from spillover.store import Store, open_store

_CLAUSE = re.compile(r"; (?![^(]*\))")  # not within parentheses

__all__ = [
    "JobOptions",
    "Result",
    "Session",
    "Work",
    "done_so_far",
    "open_session",
    "owning",
    "post",
    "recorded",
    "rehearsal",
    "rehearsed",
    "reporter",
    "run_for",
    "unprepared",
]


@dataclass(frozen=True)
class JobOptions:
    """Options that all jobs take.

    Args:
        state: URI of the durable state; None puts it into the run folder.
        weights: URI to stage the model from instead of downloading it.
        engine, device, numerics: what computes; None chooses.
        memory: how much memory it may use, as people write sizes; None is most of what there is.
        placement: ``resident`` or ``streamed``; None decides by memory.
        dry_run: only say what would be done.
        headless: nobody is watching: signals mean preemption.
        stop_after: stop on purpose after this many quanta of this process.
        takeover: fence off the present owner instead of waiting for it.
        from_previous: continue from the checkpoint before a damaged one.
        notify: URL that gets a small JSON document when the job ends.
        lease: seconds of silence after which an owner without a lock may be replaced.
        runs: folder of run folders.
    """

    state: str | None = None
    weights: str | None = None
    engine: str = "torch"
    device: str | None = None
    numerics: str | None = None
    memory: str | None = None
    placement: str | None = None
    dry_run: bool = False
    headless: bool = False
    stop_after: int | None = None
    takeover: bool = False
    from_previous: bool = False
    notify: str | None = None
    lease: float = field(default_factory=lambda: _lease_seconds())
    runs: Path = RUNS

    def __post_init__(self) -> None:
        if self.numerics not in (None, "float32", "bf16"):
            raise InputError(f"--numerics {self.numerics} is unknown", hint="use float32 or bf16")
        if self.placement not in (None, "resident", "streamed"):
            raise InputError(f"--placement {self.placement} is unknown", hint="use resident or streamed")
        if self.memory is not None:
            _ = self.memory_bytes
        if self.stop_after is not None and self.stop_after < 1:
            raise InputError(
                f"--stop-after must be at least 1, not {self.stop_after}", hint="--stop-after 10"
            )

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        try:
            return None if self.memory is None else parse_size(self.memory)
        except InputError as error:
            raise InputError(f"--memory {error}", hint="--memory 2GB, --memory 1500MiB") from None

    def asking(
        self,
        kind: Kind,
        batch: int,
        sequence: int,
        lora: LoraConfig | None = None,
        events: Events | None = None,
    ) -> Asked:
        """What to ask of an engine; ``events`` hear how far the planning is, where that takes long."""
        numerics, placement = cast("Numerics | None", self.numerics), cast("Placement | None", self.placement)
        report = None if events is None else _planning(events)
        return Asked(kind, batch, sequence, lora, numerics, self.device, self.memory_bytes, placement, report)


class Work(Protocol):
    """Checked inputs of a job."""

    @property
    def plan(self) -> Plan:
        """How the engine will do it."""
        ...

    @property
    def identity(self) -> Identity:
        """What makes it the same work on any engine and machine."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the run's manifest says beside the identity."""
        ...

    @property
    def total(self) -> int:
        """How many quanta there are in all."""
        ...

    def line(self, state: str, done: int) -> str:
        """The line before the work, of which `done` quanta are done: what, with what, how much, where to."""
        ...


@dataclass(frozen=True)
class Result:
    """How a job ended: one line for people, the command to type next, and the run if one was begun.

    ``signal`` names the signal that ended it, if one did. ``details`` are lines to show before the one, and
    ``document`` is what a program gets in their place.
    """

    ending: Ending
    message: str
    next: str | None
    run: Run | None
    signal: str | None = None
    details: tuple[str, ...] = ()
    document: bytes | None = None


def rehearsed(work: Work, state: str, done: int) -> Result:
    """The result of a job that was only asked what it would do."""
    lines = [*rehearsal(work, state, done), "nothing was begun"]
    return Result(Ending.DONE, "\n".join(lines), "the same command without --dry-run", None)


def rehearsal(work: Work, state: str, done: int) -> list[str]:
    """What some work would do, line by line, when ``done`` of its quanta are done."""
    plan = work.plan
    width = max(len(name) for name, _ in plan.parts) + 2
    return [
        *_CLAUSE.split(work.line(state, done)),
        f"memory, {plan.memory_bytes / 1e9:.2f} GB in all:",
        *(f"  {name:<{width}}{size / 1e9:6.2f} GB" for name, size in plan.parts),
        f"a pass takes up to {plan.pass_tokens:,} tokens, "
        f"reads {plan.read_bytes / 1e9:.2f} GB from the drive",
    ]


def unprepared(interrupts: Interrupts) -> Result:
    """The result of a job that a signal stopped before it had begun anything."""
    ending = interrupts.ending or Ending.PREEMPTED
    return Result(
        ending, f"{ending.value} before the work began", "the same command begins it", None, interrupts.signal
    )


@dataclass
class Session:
    """A job at work: it owns its state and listens for signals."""

    owned: Owned
    run: Run
    events: Events
    interrupts: Interrupts
    options: JobOptions
    started: float = field(default_factory=time.monotonic)

    def ending(self, quanta: int) -> Ending | None:
        """Whether the job must stop at this boundary, after ``quanta`` quanta of this process.

        Raises:
            Superseded: somebody else owns the work now.
        """
        self.owned.check()
        if self.interrupts.ending is not None:
            return self.interrupts.ending
        stop_after = self.options.stop_after
        if self.owned.stop_requested or (stop_after is not None and quanta >= stop_after):
            return Ending.STOPPED
        return None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def _lease_seconds() -> float:
    """The lease in seconds, as ``SPILL_LEASE_SECONDS`` says or the usual one."""
    text = os.environ.get("SPILL_LEASE_SECONDS") or str(LEASE_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise InputError(f"SPILL_LEASE_SECONDS is {text!r}", hint="set it to seconds, such as 60")
    return seconds


def run_for(command: str, label: str, identity: Identity, options: JobOptions) -> tuple[Run, Store]:
    """The run folder and the store of some work; neither is created yet."""
    run = Run(options.runs / run_id(command, label, identity))
    return run, open_store(options.state or run.default_state)


def recorded(store: Store, identity: Identity, options: JobOptions) -> Control | None:
    """The control object of this very work, if it was ever started; `Mismatch` if other work is there."""
    from spillover.state.control import same_work

    document = State(store, lease_seconds=options.lease).read()
    if document is not None:
        same_work(document.identity, identity)
    return document


def done_so_far(document: Control | None) -> int:
    """How many quanta of a job are durable."""
    progress = {} if document is None else document.progress
    done: int = progress.get("rows", progress.get("step", 0))
    return done


def reporter(events: Events) -> Callable[[str, int, int], None]:
    """A progress callback for expanding, downloading and hashing models: an event each half second."""
    last = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.5:
            last = now
            message = f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            events.emit("stage", stage="model", message=message, done=done, total=total)

    return report


def _planning(events: Events) -> Callable[[str, float, float], None]:
    """A progress callback for planning: an event a second."""
    last = -math.inf

    def report(what: str, done: float, total: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1:
            last = now
            events.emit("stage", stage="drive", message=f"{what}: {done:.0f} of {total:.0f} s")

    return report


@contextlib.contextmanager
def open_session(
    job: JobFile,
    run: Run,
    store: Store,
    work: Work,
    options: JobOptions,
    events: Events,
    interrupts: Interrupts,
) -> Iterator[Session]:
    """Own the state, record the run and say so; release and record how it was left at the end.

    Raises:
        Abandoned: a signal came while another owner's silence was being watched.
    """
    with owning(store, work.identity, options, events, interrupts) as owned:
        run.begin(job, store.uri, work.identity, work.facts)
        events.add(run.record)
        line = work.line(store.uri, done_so_far(owned.document))
        plan, machine = work.plan, {"host": socket.gethostname(), "hardware": hardware()}
        where = machine | {"device": plan.device, "numerics": plan.numerics}
        events.emit("start", message=line, run=run.id, state=store.uri, total=work.total, **where)
        session = Session(owned, run, events, interrupts, options)
        status = "failed"
        try:
            yield session
            status = "stopped" if owned.document.status != "completed" else "completed"
        finally:
            run.end(status, {"seconds": round(session.seconds, 3)})


@contextlib.contextmanager
def owning(
    store: Store, identity: Identity, options: JobOptions, events: Events, interrupts: Interrupts
) -> Iterator[Owned]:
    """Own the state of some work while the block runs; say once if another owner must be watched.

    Raises:
        Abandoned: a signal came while another owner's silence was being watched.
    """
    told = False

    def waiting(owner: Owner, seconds: float) -> None:
        nonlocal told
        if interrupts.signal is not None:
            raise Abandoned
        if not told:
            told = True
            message = (
                f"owned by process {owner.pid} on {owner.host}; watching up to {seconds:.0f} s "
                "for a sign of life (--takeover skips that)"
            )
            events.emit("stage", stage="waiting", message=message)

    state = State(store, lease_seconds=options.lease)
    with state.acquire(identity, takeover=options.takeover, waiting=waiting) as owned:
        yield owned


def post(url: str, body: dict[str, Any]) -> str | None:
    """POST ``body`` as JSON to ``url``; return what went wrong, which never fails the job."""
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=10):
            return None
    except (OSError, ValueError) as error:
        return f"could not notify {url}: {error}"
