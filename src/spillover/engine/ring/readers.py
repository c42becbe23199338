"""Threads that fill buffers from weight files, and the waiting for them.

A `Job` reads one part into one buffer, cut into pieces that all threads share: whatever is needed next has
all of them. Threads that have nothing to do, and whoever waits for a job, sleep on conditions of one lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spillover.engine.ring.layers import BLOCK, Part
from spillover.engine.ring.shards import Shard
from spillover.errors import EngineError, ModelError


@dataclass(eq=False)
class Job:
    """One part on its way into `buffer`. `ended` says that no thread touches the buffer any more."""

    part: Part
    buffer: NDArray[np.uint8]
    left: int = 0  # pieces that no thread is done with
    cancelled: bool = False
    ended: bool = False
    error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """Whether what is read is, or will be, of use."""
        return not self.cancelled and self.error is None


@dataclass(frozen=True)
class _Piece:
    job: Job
    shard: Shard
    start: int
    needed: int  # how many of its bytes the file must have
    view: memoryview = field(repr=False)


class Readers:
    """`threads` threads that read pieces of at most `read_bytes` from `shards`.

    Methods other than `close` are called with `lock` held.
    """

    def __init__(self, shards: Mapping[Path, Shard], threads: int, read_bytes: int) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.bytes_read = 0
        self._shards = shards
        self._read_bytes = max(read_bytes // BLOCK * BLOCK, BLOCK)
        self._work, self._done = threading.Condition(self.lock), threading.Condition(self.lock)
        self._ahead: deque[_Piece] = deque()
        self._urgent: deque[_Piece] = deque()
        self._active, self._since, self._reading = 0, 0.0, 0.0
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._run, name=f"ring-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that has the threads."""
        return os.getpid() != self._process

    @property
    def reading(self) -> float:
        """Seconds during which at least one read was under way."""
        return self._reading + (time.monotonic() - self._since if self._active else 0.0)

    def submit(self, job: Job, *, urgent: bool = False) -> None:
        """Queue the pieces of `job`; urgent ones go before all that is read ahead."""
        pieces = [piece for extent in range(len(job.part.extents)) for piece in self._cut(job, extent)]
        job.left = len(pieces)
        (self._urgent if urgent else self._ahead).extend(pieces)
        self._work.notify(len(pieces))

    def wait(self) -> None:
        """Sleep until a job ends or the readers are closed."""
        self._done.wait()

    def close(self) -> None:
        """Stop: reads under way end, the others do not begin. Idempotent; in a forked child, only files."""
        if not self.forked:
            with self.lock:
                self.closed = True
                self._work.notify_all()
                self._done.notify_all()
            for thread in self._threads:
                thread.join()
        for shard in self._shards.values():
            shard.close()

    def _cut(self, job: Job, number: int) -> list[_Piece]:
        """Pieces of one extent, about equally long."""
        extent, memory = job.part.extents[number], job.buffer.data
        length = extent.stop - extent.start
        count = -(-length // self._read_bytes)
        step = -(-length // count // BLOCK) * BLOCK
        pieces = []
        for begin in range(0, length, step):
            end = min(begin + step, length)
            needed = min(end, extent.needed - extent.start) - begin
            view = memory[extent.offset + begin : extent.offset + end]
            pieces.append(_Piece(job, self._shards[extent.file], extent.start + begin, needed, view))
        return pieces

    def _run(self) -> None:
        while (piece := self._take()) is not None:
            read, error = 0, None
            try:
                read = piece.shard.read(piece.start, piece.view, piece.needed, piece.job.part.name)
            except BaseException as caught:  # the consumer is to see it, whatever it is
                error = caught
            self._finish(piece, read, error)

    def _take(self) -> _Piece | None:
        """The next piece worth reading; None once closed."""
        with self.lock:
            while not self.closed:
                queue = self._urgent or self._ahead
                if not queue:
                    self._work.wait()
                    continue
                piece = queue.popleft()
                if piece.job.wanted:
                    if not self._active:
                        self._since = time.monotonic()
                    self._active += 1
                    return piece
                piece.job.left -= 1
                if not piece.job.left:
                    self._end(piece.job)
            return None

    def _finish(self, piece: _Piece, read: int, error: BaseException | None) -> None:
        job = piece.job
        with self.lock:
            self.bytes_read += read
            self._active -= 1
            if not self._active:
                self._reading += time.monotonic() - self._since
            job.error = job.error or error
            job.left -= 1
            if job.left:
                return
        if job.wanted:
            try:
                for file in {extent.file for extent in job.part.extents}:
                    self._shards[file].check(job.part.name)
            except BaseException as caught:
                job.error = caught
        with self.lock:
            self._end(job)

    def _end(self, job: Job) -> None:
        job.ended = True
        self._done.notify_all()


def failure(error: BaseException) -> BaseException:
    """`error` as a consumer raises it, maybe more than once: without the trace of a thread."""
    if isinstance(error, (ModelError, EngineError)):
        return type(error)(str(error), hint=error.hint)
    return error
