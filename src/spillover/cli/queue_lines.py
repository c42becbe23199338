"""What ``spill queue`` tells a person, line by line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from spillover.cli.terminal import duration, sparkline

if TYPE_CHECKING:
    from spillover.queue import Stats, TaskInfo
    from spillover.queue.audit import Audit

WIDTH = 50
"""Characters of the bar."""
STAGES = {0: "delivery", 1: "partial", 2: "fresh"}
MARKS = (("completed", "█"), ("leased", "▓"), ("pending", "░"), ("dead", "x"), ("cancelled", "-"))


def of_stats(found: Stats) -> Iterator[str]:
    state = "sealed" if found.sealed else "open"
    draining = ", draining" if found.draining else ""
    yield f"queue {found.queue}: {state}{draining}, generation {found.generation}"
    yield from _bar(found)
    yield f"accepted positions: {found.positions:,}, {found.undelivered:,} of them undelivered"
    if found.max_unfinished is not None:
        unfinished = found.pending + found.leased
        state = ": full, submissions wait" if unfinished >= found.max_unfinished else ""
        yield f"unfinished {unfinished:,} of at most {found.max_unfinished:,}{state}"
    if found.max_undelivered is not None:
        held = found.undelivered + found.leased
        state = ": full, workers wait" if held >= found.max_undelivered else ""
        yield f"undelivered or leased {held:,} of at most {found.max_undelivered:,}{state}"
    if found.end:
        yield "all done"


def of_tasks(found: Sequence[TaskInfo], limit: int) -> Iterator[str]:
    for task in found:
        worker = f"  {task.worker}" if task.worker else ""
        stage = STAGES.get(task.stage, str(task.stage))
        tried = f"attempt {task.attempt:<4} failed {task.failures}"
        yield f"{task.id:32} {task.status:10} {stage:9} {tried}{worker}"
    if not found:
        yield "no tasks"
    if len(found) == limit:
        yield f"the first {limit}; --limit for more"


def of_task(task: TaskInfo) -> Iterator[str]:
    yield f"{task.id}: {task.status}"
    yield f"stage    {STAGES.get(task.stage, task.stage)}, rank {task.rank}, lane {task.lane or '-'}"
    yield f"attempts {task.attempt}, {task.failures} of at most {task.max_attempts} failed"
    facts = (
        ("worker", task.worker),
        ("position", task.position),
        ("failure", task.failure),
        ("input", task.input),
        ("metadata", task.metadata),
    )
    for name, value in facts:
        if value is not None:
            yield f"{name:8} {value}"


def of_dead(found: Sequence[TaskInfo], target: str, queue: str) -> Iterator[str]:
    for task in found:
        yield f"{task.id:32} {task.failures} attempts: {task.failure or 'no reason given'}"
    yield f"next: spill queue retry {target} --queue {queue} --all" if found else "no dead tasks"


def of_audit(found: Audit) -> Iterator[str]:
    yield from found.problems
    state = f"{len(found.problems)} problems" if found.problems else "all is well"
    yield f"{found.queues} queues, {found.tasks:,} tasks, {found.payloads:,} payloads: {state}"


class Top:
    """What happened to a queue between looks."""

    def __init__(self) -> None:
        self._last: tuple[Stats, float] | None = None
        self._now: Stats | None = None
        self._rates: deque[float] = deque(maxlen=240)

    def look(self, stats: Stats, now: float) -> None:
        """Take a look at time ``now``, in seconds."""
        if self._last is not None:
            before, then = self._last
            self._rates.append((stats.positions - before.positions) / max(1e-9, now - then))
        self._last, self._now = (stats, now), stats

    def text(self) -> Iterator[str]:
        """The picture."""
        assert self._now is not None
        yield from of_stats(self._now)
        if self._rates:
            recent = [*self._rates][-10:]
            rate = sum(recent) / len(recent)
            left = self._now.pending + self._now.leased
            eta = duration(left / rate) if rate else "-"
            yield f"{rate:,.1f} accepted a second  {sparkline([*self._rates])}  {left:,} to go, {eta} left"


def _bar(found: Stats) -> Iterator[str]:
    parts = [(mark, name, getattr(found, name)) for name, mark in MARKS]
    whole = sum(count for *_, count in parts)
    edge, start, drawn = 0, 0, ""
    for mark, _, count in parts:
        edge += count
        stop = round(WIDTH * edge / max(1, whole))
        drawn, start = drawn + mark * (stop - start), stop
    if whole:
        yield drawn
    yield "  ".join(f"{mark} {name} {count:,}" for mark, name, count in parts)
