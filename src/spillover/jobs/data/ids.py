"""Finding the first repeated id among any number of rows in a few megabytes.

Ids are hashed to 64 bits. Hashes and row numbers go to a temporary file in sorted runs, which are then merged
a range of hashes at a time. Equal hashes are only candidates: the caller compares the ids themselves.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spillover.errors import StoreFull

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import TracebackType
    from typing import IO

    from numpy.typing import NDArray

RUN = 1 << 15  # entries sorted and written at a time
MERGE = 1 << 16  # entries merged at a time
SLICES = 256  # ranges of hashes, by their first 8 bits
ENTRY = np.dtype([("hash", np.uint64), ("row", np.int64)])


class Candidate(NamedTuple):
    """Rows, ascending, whose ids have the same hash."""

    hash: int
    rows: list[int]


class IdTable:
    """A multiset of ids on disk.

    ``digest`` maps an id to 64 signed bits. Python's own hash is keyed anew in every process, so that no file
    can be made to collide on purpose.
    """

    def __init__(self, digest: Callable[[str], int] = hash) -> None:
        self._digest = digest
        self._hashes = array("q")
        self._rows = array("q")
        self._bounds: list[NDArray[np.int64]] = []  # of each run: where each slice begins, and the end
        self._file: IO[bytes] | None = None

    def add(self, row: int, id: str) -> None:
        """Note that ``row`` has ``id``. Raises `StoreFull` when the temporary file does not fit."""
        self._hashes.append(self._digest(id))
        self._rows.append(row)
        if len(self._rows) == RUN:
            self._write_run()

    def __len__(self) -> int:
        return sum(int(bounds[-1]) for bounds in self._bounds) + len(self._rows)

    def earliest(self, refuted: Collection[int] = ()) -> Candidate | None:
        """The candidate whose second row comes first, leaving out the hashes in ``refuted``."""
        self._write_run()
        best: Candidate | None = None
        for entries in self._merged():
            candidate = _earliest(entries, refuted)
            if candidate and (best is None or candidate.rows[1] < best.rows[1]):
                best = candidate
        return best

    def __enter__(self) -> IdTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk: what could not be written is not needed any more
                self._file.close()

    def _write_run(self) -> None:
        if not self._rows:
            return
        entries = np.empty(len(self._rows), ENTRY)
        entries["hash"] = np.frombuffer(self._hashes, np.int64).view(np.uint64)
        entries["row"] = np.frombuffer(self._rows, np.int64)
        entries = entries[np.argsort(entries["hash"], kind="stable")]
        starts = np.arange(SLICES, dtype=np.uint64) << np.uint64(56)
        bounds = np.append(np.searchsorted(entries["hash"], starts), len(entries))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
            self._file.write(entries.tobytes())
            self._file.flush()
        except OSError as error:
            raise StoreFull(
                f"{tempfile.gettempdir()}: no room to compare ids: {error.strerror}", hint="set TMPDIR"
            ) from None
        self._bounds.append(bounds)
        del self._hashes[:], self._rows[:]

    def _merged(self) -> Iterator[NDArray[np.void]]:
        """All entries, sorted by hash and then row, in pieces that no hash crosses."""
        if self._file is None:
            return
        sizes = np.diff(np.stack(self._bounds), axis=1).sum(axis=0)
        low = 0
        while low < SLICES:
            high = low + 1
            while high < SLICES and sizes[low : high + 1].sum() <= MERGE:
                high += 1
            pieces = [self._read(run, low, high) for run in range(len(self._bounds))]
            entries = np.concatenate(pieces)
            yield entries[np.argsort(entries["hash"], kind="stable")]  # runs are in the order of rows
            low = high

    def _read(self, run: int, low: int, high: int) -> NDArray[np.void]:
        assert self._file is not None
        bounds = self._bounds[run]
        start, stop = int(bounds[low]), int(bounds[high])
        size = ENTRY.itemsize
        data = os.pread(self._file.fileno(), (stop - start) * size, (run * RUN + start) * size)
        return np.frombuffer(data, ENTRY)


def _earliest(entries: NDArray[np.void], refuted: Collection[int]) -> Candidate | None:
    hashes, rows = entries["hash"], entries["row"]
    repeats = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    if refuted and len(repeats):
        repeats = repeats[~np.isin(hashes[repeats], np.array(list(refuted), np.uint64))]
    if not len(repeats):
        return None
    at = repeats[np.argmin(rows[repeats])]
    found = hashes[at]
    return Candidate(int(found), [int(row) for row in rows[hashes == found]])
