"""The course of a run, read from its events: what counts of it, and who did it.

A process that dies leaves steps that nobody kept. What a later one does again replaces them here, so that
each step is there once; the time they took stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from spillover.errors import SpillError

if TYPE_CHECKING:
    from spillover.jobs.runs import Manifest, Run

__all__ = ["Durable", "History", "Point", "Process", "read_history"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # what a calendar can show


class Line(msgspec.Struct, frozen=True):
    """What is used of an event; a line where one of these is of another type counts as torn."""

    event: str
    time: Moment
    command: str | None = None
    engine: str | None = None
    step: Count | None = None
    total: Count | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    tokens: Count | None = None
    finish: str | None = None
    stage: str | None = None
    message: str | None = None
    signal: str | None = None
    complete: bool | None = None
    host: str | None = None
    hardware: str | None = None
    device: str | None = None
    numerics: str | None = None


class Point(NamedTuple):
    """A step or a row. ``worked`` is the seconds at work until then, None where only the state knows it."""

    step: int
    time: float | None = None
    worked: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    tokens: int | None = None
    finish: str | None = None


class Durable(NamedTuple):
    """Everything up to ``step`` was durable at ``time``."""

    step: int
    time: float
    worked: float


@dataclass
class Process:
    """One process's share: quanta ``after`` (exclusive) to ``until`` (inclusive).

    ``began`` and ``worked`` are the seconds at work of all processes until it began, and ended.
    """

    started: float | None
    ended: float | None
    host: str = ""
    hardware: str = ""
    engine: str = ""
    device: str = ""
    numerics: str = ""
    after: int | None = None
    until: int = 0
    ending: str = ""
    began: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds at work."""
        return 0.0 if self.started is None or self.ended is None else max(0.0, self.ended - self.started)

    @property
    def where(self) -> str:
        """What computed, in words: ``torch on cpu in float32``."""
        parts = [
            self.engine,
            f"on {self.device}" if self.device else "",
            self.numerics and f"in {self.numerics}",
        ]
        return " ".join(part for part in parts if part)


@dataclass
class History:
    """What counts of a run, in the order of its steps or rows; ``redone`` were done and not kept."""

    command: str = ""
    total: int = 0
    points: list[Point] = field(default_factory=list)
    validations: dict[int, float] = field(default_factory=dict)
    durable: dict[int, Durable] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    redone: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps or rows that are done."""
        return self.points[-1].step if self.points else 0

    @property
    def worked(self) -> float:
        """Seconds at work, of all processes."""
        return self.processes[-1].began + self.processes[-1].seconds if self.processes else 0.0

    def take(self, line: Line) -> None:
        """Add an event."""
        if line.event == "start" or not self.processes:
            self._begin(line)
        process = self.processes[-1]
        process.ended = max(line.time, process.ended or 0.0)
        process.engine = process.engine or line.engine or ""
        self.command, self.total = line.command or self.command, line.total or self.total
        step = line.step
        if step is not None and line.event in ("step", "row"):
            self._add(line, step)
        elif step is not None and line.event == "restore":
            self._rewind(step)
            process.after = process.until = step
        elif step is not None and line.event == "checkpoint":
            self.durable[step] = Durable(step, line.time, self.worked)
        elif step is not None and line.stage == "validation" and line.loss is not None:
            self.validations[step] = line.loss
        process.ending = _ending(line) or process.ending

    def _begin(self, line: Line) -> None:
        began = self.worked
        self.processes.append(Process(line.time, line.time, began=began))
        process = self.processes[-1]
        for name in ("host", "hardware", "device", "numerics"):
            setattr(process, name, getattr(line, name) or "")

    def _add(self, line: Line, step: int) -> None:
        if self.done >= step:
            self._rewind(step - 1)
        process = self.processes[-1]
        process.after = step - 1 if process.after is None else process.after
        process.until = step
        figures = (line.loss, line.lr, line.grad_norm, line.tokens_per_s, line.tokens, line.finish)
        self.points.append(Point(step, line.time, self.worked, *figures))

    def _rewind(self, step: int) -> None:
        """Forget what was done after ``step``: it is done again."""
        while self.points and self.points[-1].step > step:
            self.points.pop()
            self.redone += 1
        for later in [at for at in self.validations if at > step]:
            del self.validations[later]
        for later in [at for at in self.durable if at > step]:
            del self.durable[later]


def read_history(run: Run) -> History:
    """The history of a run, as far as its folder and, for what is missing in that, its state tell it."""
    history = History()
    for line in _lines(run.folder / "events.jsonl"):
        history.take(line)
    manifest = run.manifest()
    if manifest is not None:
        history.command = str(manifest.identity.get("command", manifest.command))
        if history.command == "tune" and len(history.points) < history.done:
            _complete(history, run, manifest)
    return history


def _lines(path: Path) -> Iterator[Line]:
    """The events of a file; lines that a dying process left half-written, and other ones, are skipped."""
    decoder = msgspec.json.Decoder(Line)
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield decoder.decode(line)


def _ending(line: Line) -> str:
    """How an event says that its process ended; empty if it does not."""
    if line.event == "done":
        return "finished" if line.complete else "stopped on purpose"
    if line.event == "preempted":
        return f"preempted by {line.signal}" if line.signal else "preempted"
    return f"failed: {line.message}" if line.event == "error" else ""


def _complete(history: History, run: Run, manifest: Manifest) -> None:
    """Add the losses of steps that other folders have the events of: a checkpoint has them all."""
    from spillover.jobs.checkpoint import KIND, TuneRecord
    from spillover.state import State
    from spillover.store import open_store

    known = {point.step for point in history.points}
    missing = history.done - len(known)
    try:
        state = State(open_store(_state_uri(run, manifest)))
        document = state.read()
        if document is None or KIND not in document.current:
            raise msgspec.DecodeError("nothing is there")
        payload = state.open(document.current[KIND])
        record = msgspec.json.decode(payload.read("state.json"), type=TuneRecord)
    except (SpillError, OSError, msgspec.DecodeError) as error:
        history.notes.append(
            f"{missing:,} steps were done elsewhere, and {manifest.state} does not tell: {error}"
        )
        return
    first = min(known)
    found = [Point(n, loss=loss) for n, loss in enumerate(record.losses, 1) if n not in known]
    history.points = sorted([*history.points, *(one for one in found if one.step < history.done)])
    history.validations = {
        step: loss for step, loss in record.validation if step < first
    } | history.validations
    elsewhere = [one for one in record.history if one.start < first - 1]
    history.processes[:0] = [
        Process(None, None, one.host, one.system, one.engine, one.device, one.numerics, one.start,
                min(one.stop, first - 1), "not in this folder")
        for one in elsewhere
    ]  # fmt: skip
    history.notes.append(
        f"the losses of {len(found):,} steps that were done elsewhere are from {manifest.state}"
    )


def _state_uri(run: Run, manifest: Manifest) -> str:
    """The state on record; the one in the folder where that was moved."""
    gone = "://" not in manifest.state and not Path(manifest.state).exists()
    return run.default_state if gone else manifest.state
