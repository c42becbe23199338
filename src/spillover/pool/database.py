"""The SQLite database of a pool or queue, with one owner.

Guarantee: a committed transaction survives a power loss (write-ahead log, ``synchronous=FULL``), and no
other process has the database open (``locking_mode=EXCLUSIVE``, which also does without shared memory, so
that the file may lie on a network mount whose locks work).

Who may open it is decided by the control object (`spillover.state`). On a local disk its lock shows that
the former owner is dead, and its database is simply opened. On a network mount a client that was cut off
may wake up later and go on writing, so there a new owner first copies the database to a file of its own
generation, and the old one writes where nobody reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sqlite3
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from spillover.errors import Corrupt, LockContended, Mismatch, StoreError, StoreFull
from spillover.store.disk import Disk
from spillover.store.filesystem import is_local

__all__ = ["open_database", "require_sound", "transaction", "translated"]

CACHE_KIB = 64 << 10
LOG_PAGES = 4000  # of the log before it is merged into the database, which costs two syncs more
TRIES = 20
STAMP_SECONDS = 0.05
"""Longer than the steps of the clock that a server stamps writes with."""


class _Connection(sqlite3.Connection):
    """One that weak references may lead to."""


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


def open_database(path: Path, generation: int, schema: str, version: int) -> sqlite3.Connection:
    """Open or make the database called ``path`` for the owner with this ``generation``.

    Args:
        path: its name on a local disk; elsewhere the generation is added to it.
        schema: SQL that makes its tables.
        version: of the schema.

    Raises:
        Mismatch: it has another schema version.
        Corrupt: it is damaged.
        LockContended: a process that should be dead still has it open.
    """
    if not is_local(path.parent):
        path = _own_copy(path, generation)
    with translated(path):
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=10, factory=_Connection
        )
        _connections.add(connection)
        try:
            _prepare(connection, path, schema, version)
        except BaseException:
            connection.close()
            raise
    return connection


def require_sound(connection: sqlite3.Connection, path: Path, schema: str) -> None:
    """Check that the tables are those of ``schema``, and that rows, constraints and indexes agree.

    Takes about half a second for a million rows. SQLite has no checksums: a bit that flipped in a row is
    seen only where an index or a constraint says otherwise.

    Raises:
        Corrupt: they do not.
    """
    query = "SELECT name, sql FROM sqlite_schema"
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema)
        wanted = {*fresh.execute(query)}
    with translated(path):
        (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        found = {*connection.execute(query)}
    if said != "ok" or not wanted <= found:
        reason = said if said != "ok" else "its tables are not as they were made"
        raise Corrupt(f"{path} is damaged: {reason}", hint="restore it from a copy")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Cursor]:
    """One transaction: durable when the block ends, or commits earlier; undone when it raises."""
    with translated(path), contextlib.closing(connection.cursor()) as cursor:
        if connection.in_transaction:  # Ctrl-C left it open
            cursor.execute("ROLLBACK")
        try:
            cursor.execute("BEGIN IMMEDIATE")
            yield cursor
            if connection.in_transaction:
                cursor.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                cursor.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours."""
    try:
        yield
    except UnicodeDecodeError as error:  # in a message of SQLite, or in a text of a table
        raise Corrupt(f"{path} is damaged: {error.reason}", hint="restore it from a copy") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull(
                f"no space left for {path}", hint="free some space and try again; nothing changed"
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise Corrupt(f"{path} is damaged: {error}", hint="restore it from a copy") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LockContended(f"{path} is still open in another process") from error
        if isinstance(error, sqlite3.OperationalError):
            raise StoreError(f"{path}: {error}") from error
        raise


def _prepare(connection: sqlite3.Connection, path: Path, schema: str, version: int) -> None:
    for pragma in (
        "locking_mode=EXCLUSIVE",
        "journal_mode=WAL",
        "synchronous=FULL",
        "fullfsync=1",
        f"cache_size=-{CACHE_KIB}",
        "temp_store=MEMORY",
        f"wal_autocheckpoint={LOG_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found not in (0, version):
        raise Mismatch(
            f"{path} has schema version {found}, this spillover reads version {version}",
            hint="pip install --upgrade spillover",
        )
    if not found:
        connection.executescript(f"BEGIN; {schema}; PRAGMA user_version={version}; COMMIT;")
        Disk().sync_folder(path.parent)


def _keep_in_child() -> None:
    """A forked child must never close a connection of its parent, not even when it ends.

    Closing the last connection deletes the write-ahead log, which the parent goes on writing to
    (sqlite.org/howtocorrupt.html, section 2.6).
    """
    for connection in [*_connections]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _own_copy(path: Path, generation: int) -> Path:
    """The database of ``generation``, copied from the newest one before it."""
    own = _generation_path(path, generation)
    if own.exists():
        return own
    before = [found for found in _generations(path) if found[0] < generation]
    if before:
        partial = own.with_name(own.name + ".part")
        _copy_quiet(before[-1][1], partial)
        disk = Disk()
        with partial.open("rb+") as file:
            disk.sync(file.fileno())
        disk.rename(partial, own)
        disk.sync_folder(path.parent)
        for _, stale in before[:-1]:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{stale}{suffix}").unlink(missing_ok=True)
    return own


def _copy_quiet(source: Path, target: Path) -> None:
    """Copy a database that nobody writes meanwhile, without touching it.

    An owner that lost its lock without noticing may be in the middle of its last commit. A copy made during
    that would hold half of it, so it is made again until nothing was written from shortly before its
    beginning to its end. Its owner may also be alive and hold the lock: fenced off by the control object, it
    acknowledges nothing more.

    Raises:
        LockContended: somebody goes on writing.
        Corrupt: the database is damaged.
    """
    log, copied_log = Path(f"{source}-wal"), Path(f"{target}-wal")
    for _ in range(TRIES):
        seen = _stamps(source, log)
        time.sleep(STAMP_SECONDS)
        copied_log.unlink(missing_ok=True)
        shutil.copyfile(source, target)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(log, copied_log)
        if _stamps(source, log) == seen:
            break
    else:
        raise LockContended(f"{source} is still written by another process")
    with translated(source), contextlib.closing(sqlite3.connect(target)) as copy:
        copy.execute("PRAGMA locking_mode=EXCLUSIVE")  # no shared memory on a network mount
        copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # closing it removes the log


def _stamps(*paths: Path) -> list[tuple[int, int]]:
    """Size and time of the last write of each file. An empty one is like none."""
    states = [path.stat() for path in paths if path.exists()]
    return [(state.st_size, state.st_mtime_ns) for state in states if state.st_size]


def _generations(path: Path) -> list[tuple[int, Path]]:
    """The databases of earlier owners, oldest first."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d{6})" + re.escape(path.suffix))
    found = ((pattern.fullmatch(entry.name), entry) for entry in path.parent.iterdir())
    return sorted((int(match[1]), entry) for match, entry in found if match)


def _generation_path(path: Path, generation: int) -> Path:
    return path.with_name(f"{path.stem}-{generation:06d}{path.suffix}")


os.register_at_fork(after_in_child=_keep_in_child)
