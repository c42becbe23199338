"""The figures of a run: as data, and as lines for people."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from spillover.report.history import History, Process

if TYPE_CHECKING:
    from spillover.jobs.runs import Manifest, Run

__all__ = ["Summary", "clock", "duration", "lines", "summary"]


ENDINGS = {"running": "at work, or lost", "completed": "finished", "stopped": "stopped", "failed": "failed"}
"""How the last process ended, by the run's status, where no event says so."""


class Loss(msgspec.Struct, frozen=True):
    """Of all steps; ``best`` is the least, at ``best_step``."""

    first: float
    last: float
    best: float
    best_step: int


class Answers(msgspec.Struct, frozen=True):
    """How answers ended, and how many tokens they have; rows that failed have none."""

    finish: dict[str, int]
    tokens: int
    median: float
    longest: int


class Share(msgspec.Struct, frozen=True):
    """What one process did: quanta ``after`` (exclusive) to ``until`` (inclusive); times in Unix seconds."""

    where: str
    host: str
    hardware: str
    after: int
    until: int
    started: float | None
    seconds: float
    ending: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``spill report --json`` prints; None where a run does not have it.

    ``done``, ``total``, ``redone`` and ``durable_at`` count steps, or rows; ``durable`` counts the points,
    ``durable_time`` is when the last was reached. ``seconds`` are those at work, ``elapsed`` from the first
    event to the last. ``tokens_per_s`` is the median.
    """

    run: str
    command: str
    status: str
    model: str
    data: str
    rows: int | None
    done: int
    total: int
    loss: Loss | None
    validation: Loss | None
    answers: Answers | None
    tokens_per_s: float | None
    seconds: float
    elapsed: float
    interruptions: int
    redone: int
    durable: int
    durable_at: int | None
    durable_time: float | None
    processes: list[Share]
    versions: dict[str, str]
    notes: list[str]

    @property
    def unit(self) -> str:
        """What is counted."""
        return "steps" if self.command == "tune" else "rows"


def summary(run: Run, history: History) -> Summary:
    """The figures of a run."""
    manifest = run.manifest()
    facts = manifest.facts if manifest else {}
    rates = [one.tokens_per_s for one in history.points if one.tokens_per_s is not None]
    times = [
        one for process in history.processes for one in (process.started, process.ended) if one is not None
    ]
    last = max(history.durable.values(), default=None)
    rows = facts.get("rows")
    tuned = history.command == "tune"
    return Summary(
        run=run.id,
        command=history.command or "work",
        status=_status(manifest),
        model=str(facts.get("model", "")),
        data=str(facts.get("data", "")),
        rows=rows if isinstance(rows, int) else None,
        done=history.done,
        total=max(history.total, history.done),
        loss=_loss((one.step, one.loss) for one in history.points),
        validation=_loss(history.validations.items()),
        answers=None if tuned else _answers(history),
        tokens_per_s=statistics.median(rates) if rates else None,
        seconds=round(history.worked, 3),
        elapsed=round(max(times) - min(times), 3) if times else 0.0,
        interruptions=max(0, len(history.processes) - 1),
        redone=history.redone,
        durable=len(history.durable),
        durable_at=last.step if last else None,
        durable_time=last.time if last else None,
        processes=[_share(one, history.processes[-1] is one, manifest) for one in history.processes],
        versions=manifest.versions if manifest else {},
        notes=history.notes,
    )


def lines(found: Summary, page: str | None = None) -> Iterator[str]:
    """The figures for a terminal, which no text of theirs can command."""
    for line in _lines(found):
        yield _plain(line)
    if page is not None:
        yield f"page           {page}"


def rows(found: Summary) -> list[tuple[str, str]]:
    """The figures in words, each with its name."""
    done = f"{found.done:,} of {found.total:,}"
    named = [
        ("what", _what(found)),
        ("where", _where(found.processes)),
        (found.unit, f"{done}{'' if found.command == 'tune' else _finishes(found)}"),
        ("loss", _loss_line(found.loss, found.unit)),
        ("validation", _loss_line(found.validation, found.unit)),
        ("answers", _lengths(found.answers)),
        ("throughput", _throughput(found)),
        ("wall time", f"{duration(found.seconds)} at work, {duration(found.elapsed)} in all"),
        ("interruptions", _interruptions(found)),
        ("durable", _durable(found)),
        *(("note", note) for note in found.notes),
    ]
    return [(name, text) for name, text in named if text]


def processes(found: Summary) -> list[tuple[str, ...]]:
    """A row for each process: number, when, where, what of, how long, how it ended."""
    return [
        (
            str(number),
            clock(one.started) if one.started is not None else "",
            one.host,
            one.where,
            f"{one.after + 1:,} to {one.until:,}" if one.until > one.after else "none",
            duration(one.seconds) if one.started is not None else "",
            one.ending,
        )
        for number, one in enumerate(found.processes, 1)
    ]


def duration(seconds: float) -> str:
    """``7.1 s``, ``3:05`` or ``2:03:05``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def clock(moment: float) -> str:
    """Local time of Unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _lines(found: Summary) -> Iterator[str]:
    yield f"{found.run}: {found.status}"
    yield from (f"{name:14} {text}" for name, text in rows(found))
    if len(found.processes) > 1:
        table = [("", "began", "host", "computed by", found.unit, "took", "ended"), *processes(found)]
        widths = [max(len(row[place]) for row in table) for place in range(len(table[0]) - 1)]
        for row in table:
            cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
            yield f"  {'  '.join(cells)}  {row[-1]}".rstrip()


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _status(manifest: Manifest | None) -> str:
    """The status on record; a run whose process died on this machine still says running."""
    if manifest is None:
        return "unknown, its manifest.json cannot be read"
    return "killed" if manifest.status == "running" and _is_dead(manifest) else manifest.status


def _is_dead(manifest: Manifest) -> bool:
    """Whether the process on record is known not to live."""
    if manifest.host != socket.gethostname() or manifest.pid <= 0:
        return False
    try:
        os.kill(manifest.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _share(process: Process, is_last: bool, manifest: Manifest | None) -> Share:
    ending = process.ending or "killed or lost"
    if is_last and manifest is not None and not process.ending:
        ending = ENDINGS.get(_status(manifest), ending)
    if is_last and manifest is not None:  # older runs have it only there
        process.host, process.hardware = process.host or manifest.host, process.hardware or manifest.hardware
        for name in ("engine", "device", "numerics"):
            setattr(process, name, getattr(process, name) or str(manifest.facts.get(name, "")))
    after = process.after or 0
    return Share(
        where=process.where,
        host=process.host,
        hardware=process.hardware,
        after=after,
        until=max(process.until, after),
        started=process.started,
        seconds=round(process.seconds, 3),
        ending=ending,
    )


def _loss(course: Iterable[tuple[int, float | None]]) -> Loss | None:
    known = [(step, loss) for step, loss in course if loss is not None and math.isfinite(loss)]
    if not known:
        return None
    best_step, best = min(known, key=lambda one: one[1])
    return Loss(known[0][1], known[-1][1], best, best_step)


def _answers(history: History) -> Answers | None:
    finish = Counter(one.finish or "unknown" for one in history.points)
    lengths = [one.tokens for one in history.points if one.tokens is not None and one.finish != "error"]
    if not finish:
        return None
    median = statistics.median(lengths) if lengths else 0.0
    return Answers(dict(finish.most_common()), sum(lengths), median, max(lengths, default=0))


def _what(found: Summary) -> str:
    given = f", {found.rows:,} rows" if found.rows is not None else ""
    return f"{found.command} {found.model or 'an unknown model'} on {found.data or 'unknown data'}{given}"


def _where(shares: Sequence[Share]) -> str:
    if not shares:
        return ""
    last = shares[-1]
    hosts = len({one.host for one in shares if one.host})
    others = f"; {hosts} machines in all" if hosts > 1 else ""
    return ", ".join(text for text in (last.host, last.where, last.hardware) if text) + others


def _loss_line(loss: Loss | None, unit: str) -> str:
    if loss is None:
        return ""
    best = f"best {loss.best:.4f} at {unit[:-1]} {loss.best_step:,}"
    return f"first {loss.first:.4f}, last {loss.last:.4f}, {best}"


def _finishes(found: Summary) -> str:
    if found.answers is None:
        return ""
    return "; " + ", ".join(f"{count:,} {name}" for name, count in found.answers.finish.items())


def _lengths(answers: Answers | None) -> str:
    if answers is None or not answers.tokens:
        return ""
    return f"{answers.tokens:,} tokens; a row has {answers.median:,.0f} (median), at most {answers.longest:,}"


def _throughput(found: Summary) -> str:
    if found.tokens_per_s is None:
        return ""
    return f"{found.tokens_per_s:,.0f} tokens/s (median)"


def _interruptions(found: Summary) -> str:
    if not found.processes:
        return ""
    if not found.interruptions:
        return "none"
    again = f"; {found.redone:,} {found.unit} done again" if found.redone else "; nothing done again"
    return f"{found.interruptions}, continued each time{again}"


def _durable(found: Summary) -> str:
    if found.durable_at is None or found.durable_time is None:
        return ""
    points = f"{found.durable:,} point{'s' if found.durable > 1 else ''}"
    return f"{points}, the last at {found.unit[:-1]} {found.durable_at:,}, {clock(found.durable_time)}"
