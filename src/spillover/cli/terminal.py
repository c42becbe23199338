"""What a person or a log collector sees of a job. Nothing is computed here."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from spillover.errors import SpillError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spillover.jobs.events import Event

__all__ = ["Headless", "Live", "display", "duration", "error_line", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
TOLD = ("start", "restore", "checkpoint", "stage")
PASSING = ("model", "input", "drive")
"""Stages that matter while they last."""


def error_line(error: SpillError) -> str:
    """``spill: what happened. Try: what to type.``"""
    message = str(error).rstrip(".")
    return f"spill: {message}. Try: {error.hint}" if error.hint else f"spill: {message}."


def duration(seconds: float | None) -> str:
    """``7 s``, ``3:05`` or ``2:03:05``; a dash when it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of ``values`` in at most ``width`` block characters, each the mean of its share."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


class Headless:
    """JSON lines on stdout for programs; the few lines that a person needs on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def show(self, event: Event) -> None:
        _write(sys.stdout, msgspec.json.encode(event).decode())
        told = event["event"] in TOLD and event.get("stage") != "input"
        if told and not self.quiet and event.get("message"):
            self.text(event["message"])

    def text(self, line: str) -> None:
        _write(sys.stderr, line)


class Silent(Headless):
    """For a command whose stdout is one document: what a person needs, on stderr."""

    def show(self, event: Event) -> None:
        pass


def _write(stream: TextIO, line: str) -> None:
    """Write a line. A reader that left or a full disk must not end the work: the run folder has it all."""
    try:
        stream.write(line + "\n")  # in one call, since a checkpoint is told from its own thread
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Live:
    """A live picture: how far, how fast, until when, the loss as a curve, and what is durable."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.quiet = quiet
        self.console = Console(highlight=False)
        self._state: Event = {}
        self._losses: deque[float] = deque(maxlen=4000)
        self._durable = "nothing yet"
        self._started = time.monotonic()
        self._live = RichLive(
            console=self.console, refresh_per_second=8, transient=True, get_renderable=self._picture
        )

    def show(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("step", "row"):
            self._state = event
            if kind == "step":
                self._losses.append(event["loss"])
        elif kind == "checkpoint":
            self._durable = event["message"]
        elif kind in ("start", "restore", "stage") and event.get("message"):
            if event.get("stage") in PASSING:
                self._state = event
            elif not self.quiet:
                self.text(event["message"])

    def text(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        event = self._state
        if not event:
            return Text(f"{duration(time.monotonic() - self._started)}", style="dim")
        if event["event"] == "stage":
            return Text(event["message"], style="dim")
        bar = ProgressBar(total=event["total"], completed=event["step"], width=60)
        lines: list[RenderableType] = [bar, Text(self._facts(event))]
        if self._losses:
            lines.append(
                Text(f"loss {self._losses[-1]:7.4f}  {sparkline([*self._losses], 60)}", style="cyan")
            )
        lines.append(Text(self._durable, style="green", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _facts(self, event: dict[str, Any]) -> str:
        unit = "steps" if event["event"] == "step" else "rows"
        rate = event["tokens_per_s"]
        return "   ".join(
            [
                f"{event['step']:,} of {event['total']:,} {unit}",
                f"{rate:,.0f} tokens/s" if rate is not None else "",
                *([f"{event['share']:.0%} of {event['bound']}"] if event["share"] is not None else []),
                f"{duration(event['eta_s'])} left",
                f"{event['peak_mem_gb']:.1f} GB",
            ]
        )


@contextlib.contextmanager
def display(command: str, *, headless: bool, quiet: bool, silent: bool = False) -> Iterator[Headless | Live]:
    """The display for one job; ``silent`` leaves stdout to what comes at the end."""
    if silent:
        yield Silent(quiet)
        return
    if headless:
        yield Headless(quiet)
        return
    live = Live(quiet)
    live.start()
    try:
        yield live
    finally:
        live.stop()
