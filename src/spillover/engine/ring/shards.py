"""One weight file, read at given positions past the page cache, and watched for changes.

Linux reads with ``O_DIRECT``; where a file system refuses that, at the open or at a read, the file is read
through the page cache and what was read is dropped from it. macOS sets ``F_NOCACHE``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import threading
from pathlib import Path

from spillover.errors import ModelError

_DIRECT: int = getattr(os, "O_DIRECT", 0)
_AGAIN = "leave the model's folder alone while it is in use, or get the model again"


class Shard:
    """An open weight file.

    `direct` says whether the page cache is passed by; `cached_bytes` were read through it all the same.
    Raises `ModelError`, as every method does, with one line that names the file.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self.direct = False
        self.cached_bytes = 0
        self._lock = threading.Lock()
        self._descriptor = -1
        self._buffered = -1
        try:
            self._descriptor, self.direct = _open(path, direct)
            facts = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise ModelError(f"{path} cannot be opened: {error.strerror}", hint=_AGAIN) from None
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise ModelError(f"{path} is not a file", hint=_AGAIN)
        self._identity = _identity(facts)

    def read(self, start: int, view: memoryview, needed: int, what: str) -> int:
        """Fill `view` with the bytes from `start` on, and return how many were read.

        The file may end inside `view`, but not before `needed` bytes. `start`, the length and the address of
        `view` are multiples of 4096; others are read through the page cache. `what` is for the message.
        """
        done = 0
        while done < needed:
            try:
                count = self._read(start + done, view[done:])
            except OSError as error:
                raise ModelError(
                    f"{self.path} cannot be read for {what}: {error.strerror}", hint=_AGAIN
                ) from None
            if not count:
                raise self._truncated(start + needed, what)
            done += count
        return done

    def check(self, what: str) -> None:
        """Raise `ModelError` when the path no longer names the file that was opened, or the file changed."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            gone = "is gone" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}"
            raise ModelError(f"{self.path}, which {what} is read from, {gone}", hint=_AGAIN) from None
        if _identity(now) == self._identity:
            return
        if _identity(now)[:2] == self._identity[:2] and now.st_size < self._identity[2]:
            raise self._truncated(self._identity[2], what)
        raise ModelError(
            f"{self.path} was changed or replaced after it was opened, so {what} would be of another model",
            hint=_AGAIN,
        )

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptors = {self._descriptor, self._buffered} - {-1}
        self._descriptor = self._buffered = -1
        for descriptor in descriptors:
            os.close(descriptor)

    def _truncated(self, end: int, what: str) -> ModelError:
        size = self._identity[2]
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
        return ModelError(f"{self.path} is truncated at {what}: {size:,} of {end:,} bytes", hint=_AGAIN)

    def _read(self, start: int, view: memoryview) -> int:
        if self.direct:
            try:
                return os.preadv(self._descriptor, [view], start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._read_cached(start, view)

    def _read_cached(self, start: int, view: memoryview) -> int:
        with self._lock:
            if self._buffered < 0:
                # by the descriptor: the path may name another file by now
                here = f"/proc/self/fd/{self._descriptor}"
                self._buffered = os.open(here, os.O_RDONLY) if self.direct else self._descriptor
        count = os.preadv(self._buffered, [view], start)
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._buffered, start, count, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.cached_bytes += count
        return count


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """A descriptor, and whether its reads pass the page cache by."""
    if direct and _DIRECT:
        try:
            return os.open(path, os.O_RDONLY | _DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    descriptor = os.open(path, os.O_RDONLY)
    if direct and sys.platform == "darwin":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            return descriptor, True
    return descriptor, False


def _identity(facts: os.stat_result) -> tuple[int, int, int, int]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
