"""Checking a whole file before any work is done on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from spillover.jobs.data.ids import Candidate, IdTable
from spillover.jobs.data.lines import JsonLines, Stamp
from spillover.jobs.data.parse import quoted
from spillover.jobs.data.rows import Purpose, Row, generated_id, rows_of, unfit

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from spillover.jobs.data.shapes import Shape


@dataclass(frozen=True)
class FileSummary:
    """What a checked file holds.

    Attributes:
        bytes: size of the file.
        sha256: hex digest of the file, for a job to pin its input by.
        with_expected: rows that have something to compare with.
        with_ids: rows that bring their own ``custom_id``.
        fits: the purposes that every row can serve.
        stamp: tells cheaply that the file was written to since; for `read_rows`.
    """

    path: Path
    shape: Shape
    rows: int
    bytes: int
    sha256: str
    with_expected: int
    with_ids: int
    with_tools: int
    fits: tuple[Purpose, ...]
    stamp: Stamp


def check_file(
    path: str | os.PathLike[str],
    purpose: Purpose | None = None,
    *,
    digest: Callable[[str], int] = hash,
) -> FileSummary:
    """Read every row of a file once, in memory that does not depend on how many there are.

    Raises `InputError` with the file and line for the first row that is wrong or unfit for ``purpose``, and
    then for the first id that was already used, naming both lines. ``digest`` hashes ids to 64 signed bits.
    """
    with JsonLines(path) as lines, IdTable(digest) as table:
        tally = _Tally()
        for row in rows_of(lines):
            if purpose is not None and (fault := unfit(row, purpose)):
                raise lines.error(row.line, fault.message, hint=fault.hint)
            tally.add(row)
            if tally.with_ids:
                _note_id(table, row, first=tally.with_ids == 1)
        _require_unique(lines, table)
        return FileSummary(
            path=lines.path,
            shape=row.shape,
            rows=row.index + 1,
            bytes=lines.size,
            sha256=lines.sha256,
            with_expected=tally.with_expected,
            with_ids=tally.with_ids,
            with_tools=tally.with_tools,
            fits=tuple(tally.fits),
            stamp=lines.stamp,
        )


class _Tally:
    def __init__(self) -> None:
        self.with_expected = 0
        self.with_ids = 0
        self.with_tools = 0
        self.fits: list[Purpose] = list(get_args(Purpose))

    def add(self, row: Row) -> None:
        self.with_expected += row.expected is not None
        self.with_ids += row.id != generated_id(row.index)
        self.with_tools += row.tools is not None
        for purpose in [purpose for purpose in self.fits if unfit(row, purpose)]:
            self.fits.remove(purpose)


def _note_id(table: IdTable, row: Row, *, first: bool) -> None:
    """Add a row's id; generated ids differ by construction and only count once a row brings its own."""
    if first and not len(table):
        for index in range(row.index):
            table.add(index, generated_id(index))
    table.add(row.index, row.id)


def _require_unique(lines: JsonLines, table: IdTable) -> None:
    refuted: set[int] = set()
    while candidate := table.earliest(refuted):
        _compare(lines, candidate)
        refuted.add(candidate.hash)


def _compare(lines: JsonLines, candidate: Candidate) -> None:
    """Read the candidate's rows again and raise `InputError` if two of their ids are the same."""
    wanted = set(candidate.rows)
    seen: dict[str, int] = {}
    with JsonLines(lines.path, stamp=lines.stamp) as again:
        for row in rows_of(again):
            if row.index not in wanted:
                continue
            if row.id in seen:
                raise lines.error(
                    row.line,
                    f"the id {quoted(row.id)} is already used on line {seen[row.id]}",
                    hint="give each row its own custom_id, or none",
                )
            seen[row.id] = row.line
            if row.index == candidate.rows[-1]:
                return
