"""How far some long work is, for a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["counting", "progress", "steps"]

Report = Callable[[int, int], None]
"""Told of bytes, or things, done and in all."""
Turn = Callable[[int, int, str], None]
"""Told of things done, things in all, and what is being done or was done last."""


@contextlib.contextmanager
def progress(what: str, *, silent: bool) -> Iterator[Report]:
    """Show share, bytes, rate and time left while the block runs, and nothing after it.

    Args:
        what: the work, in a word.
        silent: show nothing, as where stdout is no terminal.
    """
    with steps(what, silent=silent) as (report,):
        yield report


@contextlib.contextmanager
def steps(*names: str, silent: bool) -> Iterator[list[Report]]:
    """Like `progress` for work in several steps, with a bar for each that has begun."""
    if silent or not sys.stdout.isatty():
        yield [lambda done, total: None for _ in names]
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _shown(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as shown:
        tasks = [shown.add_task(name, total=None, visible=name == names[0]) for name in names]

        def report_on(place: int) -> Report:
            def report(done: int, total: int) -> None:
                shown.update(tasks[place], completed=done, total=total, visible=True)

            return report

        yield [report_on(place) for place in range(len(names))]


@contextlib.contextmanager
def counting(what: str, unit: str, *, silent: bool) -> Iterator[Turn]:
    """Like `progress`, for things that are no bytes: share, count, time, and a word on the present one.

    Args:
        unit: what is counted, in the plural.
    """
    if silent or not sys.stdout.isatty():
        yield lambda done, total, now: None
        return
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with _shown(*columns) as shown:
        task = shown.add_task(what, total=None, now="")
        yield lambda done, total, now: shown.update(task, completed=done, total=total, now=escape(now))


@contextlib.contextmanager
def _shown(*columns: ProgressColumn) -> Iterator[Progress]:
    """Bars with their names and shares before ``columns``, gone when the block ends."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    end = (TextColumn("left"),) if any(isinstance(column, TimeRemainingColumn) for column in columns) else ()
    console = Console(highlight=False)
    named = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *columns, *end)
    with Progress(*named, console=console, transient=True) as shown:
        yield shown
