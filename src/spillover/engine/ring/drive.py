"""How fast the drive under a model reads, and with how many threads and how large reads.

Measured once per drive, over a sustained read past the page cache, and kept in ``SPILL_HOME/drives.json``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from spillover.engine.ring.memory import allocate
from spillover.engine.ring.shards import Shard
from spillover.errors import ModelError
from spillover.models.folders import home, write_atomic

_MIB = 1 << 20
# not fewer threads: where one waits while the consumer has the interpreter, the drive needs others
_CANDIDATES = ((4, 8 * _MIB), (4, 16 * _MIB), (8, 16 * _MIB), (4, 32 * _MIB), (8, 32 * _MIB), (4, 64 * _MIB))
_ROUNDS, _SLICE = 3, 0.5  # turns of each candidate, and the seconds of one
_SUSTAINED = 10.0
_CLOSE = 0.97  # this share of the best rate is as good, when less is in flight
_MONTH = 30 * 24 * 3600.0


# unknown fields are of another version's measurement, whose rate would read as 0
class Drive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a drive is read: `threads` reads of `read_bytes` at once.

    `rate` is what it sustains that way, in bytes per second, 0 when it was not measured. `measured` is the
    time of that, in seconds since 1970; `direct` says whether the page cache was passed by, and `source` in
    words what was read.
    """

    threads: int = 4
    read_bytes: int = 16 * _MIB
    rate: float = 0.0
    measured: float = 0.0
    direct: bool = False
    source: str = ""


def known_drive(folder: Path) -> Drive:
    """The drive under `folder`, which need not exist, as it was measured within a month.

    The usual numbers with rate 0 when it was not.
    """
    drive = _load().get(identity(existing(folder)))
    return drive if drive is not None and 0 <= time.time() - drive.measured < _MONTH else Drive()


def measure_drive(
    files: Sequence[Path],
    report: Callable[[float, float], None] | None = None,
    *,
    seconds: float = _SUSTAINED,
    source: str = "",
) -> Drive:
    """Measure the drive under `files`, the weight files of one model, and keep the result.

    Candidates take turns for half a second each; then the best reads for `seconds` or the size of the files,
    whichever is less, and that is its rate. Takes up to 20 s and 256 MiB of memory. `report` hears seconds
    done and in all; `source` is what the files are, in words. `ModelError` for a file that
    cannot be read, `EngineError` when there is no memory.
    """
    turns = [one for _ in range(_ROUNDS) for one in _CANDIDATES]
    rates: dict[tuple[int, int], list[float]] = {one: [] for one in _CANDIDATES}
    short = min(_SLICE, seconds / 10)
    trying = len(turns) * short
    tell = partial(_tell, report, trying + seconds)
    with contextlib.ExitStack() as opened:
        shards = [opened.enter_context(contextlib.closing(Shard(file))) for file in files]
        for shard in shards:
            if not shard.direct:
                _uncache(shard.path)
        cursor = _Cursor(shards)
        buffer = allocate(max(threads * read for threads, read in _CANDIDATES))
        for number, one in enumerate(turns):
            rates[one].append(_rate(cursor, *one, buffer, short))
            tell(short * (number + 1))
        threads, read_bytes = _best({one: statistics.median(found) for one, found in rates.items()})
        rate = _rate(cursor, threads, read_bytes, buffer, seconds, lambda spent: tell(trying + spent))
        direct = not any(shard.cached_bytes for shard in shards)
    tell(trying + seconds)
    drive = Drive(threads, read_bytes, rate, time.time(), direct, source)
    with contextlib.suppress(OSError):  # a read-only home only means measuring again
        path = home() / "drives.json"
        write_atomic(path, msgspec.json.format(msgspec.json.encode(_load() | {identity(files[0]): drive})))
    return drive


def identity(path: Path) -> str:
    """The drive that holds `path`: the machine, the device's numbers and, on Linux, what is mounted."""
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts: list[list[str]] = []
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # fields: proc_pid_mountinfo(5); the type and the source follow the separator
    named = next((one[one.index("-") + 1 :][:2] for one in mounts if one[2] == numbers), [])
    return " ".join([platform.node(), numbers, *named])


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: what will be at `path` is on the same drive."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def _tell(report: Callable[[float, float], None] | None, total: float, done: float) -> None:
    if report is not None:
        report(min(done, total), total)


def _load() -> dict[str, Drive]:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((home() / "drives.json").read_bytes(), type=dict[str, Drive])
    return {}


def _best(rates: dict[tuple[int, int], float]) -> tuple[int, int]:
    """The candidate with the least in flight among those that are about as fast as the fastest."""
    enough = _CLOSE * max(rates.values())
    return min((one for one, rate in rates.items() if rate >= enough), key=lambda one: (one[0] * one[1], one))


def _uncache(path: Path) -> None:
    """Drop a file from the page cache: reads through it would be of memory."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Cursor:
    """Hands out places to read, file after file and round and round: what was just read comes again last."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sizes = [shard.path.stat().st_size for shard in shards]
        self._lock = threading.Lock()
        self._file, self._start = 0, 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes)

    def take(self, length: int) -> tuple[Shard, int, int]:
        """(shard, start, bytes there are, at most `length`); `length` is a multiple of `BLOCK`."""
        with self._lock:
            shard, start = self._shards[self._file], self._start
            size = self._sizes[self._file]
            self._start += length
            if self._start >= size:
                self._file, self._start = (self._file + 1) % len(self._shards), 0
            return shard, start, min(length, size - start)


def _rate(
    cursor: _Cursor,
    threads: int,
    read_bytes: int,
    buffer: NDArray[np.uint8],
    seconds: float,
    heard: Callable[[float], None] | None = None,
) -> float:
    """Bytes per second of reading for `seconds`, or all files once; `heard` hears of them now and then."""
    done = [0] * threads
    failed: list[ModelError] = []
    begin = time.monotonic()

    def read(number: int) -> None:
        view = buffer.data[number * read_bytes : (number + 1) * read_bytes]
        while time.monotonic() - begin < seconds and sum(done) < cursor.size and not failed:
            shard, start, there = cursor.take(read_bytes)
            try:
                done[number] += shard.read(start, view, there, "measuring the drive")
            except ModelError as error:
                failed.append(error)

    workers = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():
            worker.join(_SLICE)
            if heard is not None:
                heard(time.monotonic() - begin)
    if failed:
        raise failed[0]
    return sum(done) / (time.monotonic() - begin)
