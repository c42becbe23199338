"""The system calls that local durability rests on, in one place.

`LocalStore` writes only through a `Disk`. That keeps the order of write, sync and rename readable,
and lets the tests stand in a disk that loses whatever was not synced when the power goes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spillover.errors import StoreError, StoreFull, StoreRefused

__all__ = ["Disk", "refusal"]

IOV_MAX = 1024
"""Most buffers of one gathered write (limits.h on Linux and macOS)."""


def refusal(error: OSError, what: str) -> StoreError:
    """What the operating system's ``error`` means to the caller who wanted ``what``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(
            f"no space left for {what}",
            hint="free some space and run the same command again; what was reported durable is intact",
        )
    if error.errno == errno.EROFS:
        return StoreRefused(
            f"{what} is on a read-only mount", hint="mount it for writing, or only read from it"
        )
    return StoreError(f"{what}: {os.strerror(error.errno or 0)}")


class Disk:
    """The real disk. File arguments are descriptors, name arguments are absolute paths."""

    def open(self, path: Path) -> int:
        """Create ``path``, which must not exist, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(file, view) :]

    def write_at(self, file: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write all of ``parts``, one after the other, from ``offset`` on."""
        for first in range(0, len(parts), IOV_MAX):
            group = parts[first : first + IOV_MAX]
            size = sum(map(len, group))
            written = os.pwritev(file, group, offset)
            if written < size:  # a signal, a limit, or 2 GiB, which is the most of one call
                self.write_at(file, _after(group, written), offset + written)
            offset += size

    def sync_data(self, file: int) -> None:
        """Like `sync`, but leaves times and permissions for later."""
        if sys.platform == "darwin":
            self.sync(file)
        else:
            os.fdatasync(file)

    def truncate(self, file: int, size: int) -> None:
        """Cut a file to ``size`` bytes."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Return once the file's bytes would survive a power loss."""
        if sys.platform == "darwin":  # fsync there stops at the drive's cache
            import fcntl

            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give ``old`` the name ``new``, atomically replacing what has it."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give ``old`` the second name ``new``; `FileExistsError` if that is taken."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Create a folder; `FileExistsError` if it is there."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder; `OSError` if it is not empty."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Return once the names in a folder would survive a power loss."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(folder)
        finally:
            os.close(folder)


def _after(parts: Sequence[bytes | memoryview], skip: int) -> list[bytes | memoryview]:
    """What is left of ``parts`` after their first ``skip`` bytes."""
    rest: list[bytes | memoryview] = []
    for part in parts:
        if skip < len(part):
            rest.append(memoryview(part)[skip:] if skip else part)
        skip = max(0, skip - len(part))
    return rest
