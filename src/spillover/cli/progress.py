"""How far some work with many bytes is, for a person at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress"]

Report = Callable[[int, int], None]
"""Told of bytes done and bytes in all."""


@contextlib.contextmanager
def progress(what: str, *, silent: bool) -> Iterator[Report]:
    """Show share, bytes, rate and time left while the block runs, and nothing after it.

    Args:
        what: the work, in a word.
        silent: show nothing, as where stdout is no terminal.
    """
    if silent or not sys.stdout.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(highlight=False), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
