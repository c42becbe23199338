"""``spill report``: what a run did, as a table and as a page of curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillover.cli.answers import answer
from spillover.errors import InputError, StoreError

__all__ = ["report"]


def report(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, the beginning of its name, its folder, or `last`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the page here, not to report.html in the run's folder.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object; the page is only written where --out says.")
    ] = False,
) -> None:
    """Show what a run did, and write a page of its curves.

    The page is one HTML file that loads nothing from anywhere: losses, learning rate, gradient norm and speed
    of a tune, progress, speed and answer lengths of a run, with what was durable and who continued when.
    """
    from spillover.jobs.runs import atomic_file, find_run
    from spillover.report import lines, page, read_history, summary

    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder", hint="name a file")
    found = find_run(run)
    if not found.has_course:
        raise InputError(
            f"{found.id} is an evaluation: its scores are in {found.folder}/report.json",
            hint="the same spill eval prints them again",
        )
    history = read_history(found)
    figures = summary(found, history)
    target = out or (None if json else found.folder / "report.html")
    try:
        if target is not None:
            atomic_file(target, [page(figures, history).encode()])
    except StoreError as error:
        raise StoreError(str(error), hint="name another place: --out FILE.html") from error
    answer(figures, json, lambda: lines(figures, str(target)))
