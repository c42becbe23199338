"""A folder on a local disk as a store.

Guarantee: every value is one complete write, and what a call reported done survives a power loss.

Steps of a write: a temporary file beside the target, its bytes, fsync; then a rename (``write``,
``replace``) or an exclusive hard link (``create``); then fsync of the folder, and of every folder
that had to be made. ``replace`` compares versions while it holds a flock on one stable file, the only
critical section, a few milliseconds long and released by the kernel if its holder dies.

Versions are content hashes, so a restored copy of old bytes is recognised for what it is.

Temporary files are locked (flock) while they are written. One that nobody locks belongs to a dead
process and is removed by `sweep`; no clock and no process id is trusted for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path

from spillover.errors import LockContended, Lost, NotFound, Unknown
from spillover.store.base import Blob, Entry, Source, Store, chunked, valid_key
from spillover.store.disk import Disk, refusal
from spillover.store.filesystem import require_local

__all__ = ["LocalStore"]

TEMPORARY = ".tmp-"
LOCK = ".lock"


class LocalStore(Store):
    """The folder ``root``, created when something is first written."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = Path(os.path.abspath(root))
        self.uri = str(self.root)
        self._disk = disk or Disk()

    def read(self, key: str) -> Blob:
        with self._translated(key):
            data = self._path(key).read_bytes()
        return Blob(data, _version(data))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        with self._translated(key), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(max(0, stop - start))

    def head(self, key: str) -> Entry:
        with self._translated(key):
            return Entry(key, self._path(key).stat().st_size)

    def write(self, key: str, source: Source) -> None:
        path = self._path(key)
        with self._translated(key), self._written(path, source) as temporary:
            self._disk.rename(temporary, path)
            self._sync_name(path)

    def create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._translated(key), self._written(path, data) as temporary:
            try:
                self._disk.link(temporary, path)
            except FileExistsError:
                raise Lost(f"{key} already exists in {self.uri}") from None
            self._sync_name(path)
        return _version(data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        with self._exclusive():
            try:
                current = self.read(key).version
            except NotFound:
                raise Lost(f"{key} does not exist in {self.uri}") from None
            if current != version:
                raise Lost(f"{key} has changed in {self.uri}")
            self.write(key, data)
        return _version(data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder = self.root / prefix.rpartition("/")[0]
        for path in sorted(_files(folder), key=lambda found: found.relative_to(self.root).as_posix()):
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    yield Entry(key, path.stat().st_size)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translated(key):
            try:
                self._disk.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            self._disk.sync_folder(path.parent)
            self._prune(path.parent)

    def require_safe(self) -> None:
        require_local(self.root)

    def hold(self, key: str) -> FileHold:
        path = self._path(key)
        with self._translated(key):
            self.make_folder(path.parent)
            return FileHold(path)

    def sweep(self) -> int:
        swept = 0
        for path in _files(self.root, hidden=True):
            if path.name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError, LockContended):
                    hold = FileHold(path, create=False)
                    path.unlink(missing_ok=True)
                    hold.close()
                    swept += 1
        return swept

    def _path(self, key: str) -> Path:
        return self.root / valid_key(key)

    @contextlib.contextmanager
    def _written(self, path: Path, source: Source) -> Iterator[Path]:
        """Yield a temporary file beside ``path`` whose bytes are durable; remove it afterwards."""
        self.make_folder(path.parent)
        temporary, file = self._temporary(path)
        try:
            for piece in chunked(source):
                self._disk.write(file, piece)
            self._disk.sync(file)
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):  # it was renamed
                self._disk.unlink(temporary)
            os.close(file)

    def _temporary(self, path: Path) -> tuple[Path, int]:
        """A new locked file beside ``path``. A sweep may take one between its creation and its lock."""
        while True:
            temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
            file = self._disk.open(temporary)
            fcntl.flock(file, fcntl.LOCK_EX)
            if temporary.exists():
                return temporary, file
            os.close(file)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the store's own lock: one compare-and-swap at a time."""
        with self._translated(LOCK):
            self.make_folder(self.root)
            file = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _sync_name(self, path: Path) -> None:
        """Make a new name durable. If that fails, it is there now and may be gone after a power loss."""
        try:
            self._disk.sync_folder(path.parent)
        except OSError as error:
            raise Unknown(f"{path} may not be durable: {error.strerror}") from error

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` so that its name, and those above it, survive a power loss."""
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            self._disk.mkdir(folder)
        self._disk.sync_folder(folder.parent)

    def _prune(self, folder: Path) -> None:
        """Remove folders that a deletion left empty, up to the root."""
        while folder != self.root and folder.is_relative_to(self.root):
            try:
                self._disk.rmdir(folder)
            except OSError:
                return
            folder = folder.parent

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turn the operating system's errors into the store's."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFound(f"{key} does not exist in {self.uri}") from error
        except OSError as error:
            raise refusal(error, f"{key} in {self.uri}") from error


_holds: weakref.WeakSet[FileHold] = weakref.WeakSet()


class FileHold:
    """An exclusive flock on a file, held until `release` or the end of the process.

    The descriptor is close-on-exec, so a program started by this process does not keep the lock; nor does
    a forked child.

    Raises:
        LockContended: another open file holds the lock.
        FileNotFoundError: the file does not exist and ``create`` is false.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        while True:
            self._file = os.open(path, flags, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._file), os.stat(path)):
                    _holds.add(self)
                    return
            except BlockingIOError:
                os.close(self._file)
                raise LockContended(f"{path} is locked by another process") from None
            except FileNotFoundError:
                pass
            os.close(self._file)  # the file was removed or replaced between open and flock: look again
            if not create and not path.exists():
                raise FileNotFoundError(path)

    def release(self) -> None:
        """Remove the file and let the lock go."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let the lock go and leave the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(folder: Path, *, hidden: bool = False) -> Iterator[Path]:
    """Yield the files below ``folder``, which may shrink meanwhile; the store's own only if ``hidden``."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            if hidden or not (name.startswith(TEMPORARY) or name == LOCK):
                yield Path(parent, name)


def _close_in_child() -> None:
    """A forked child must not keep the locks of its parent after the parent died."""
    for hold in [*_holds]:
        hold.close()


os.register_at_fork(after_in_child=_close_in_child)
