"""The system calls that local durability rests on, in one place.

`LocalStore` writes only through a `Disk`. That keeps the order of write, sync and rename readable,
and lets the tests stand in a disk that loses whatever was not synced when the power goes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["Disk"]


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
