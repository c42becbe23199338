"""The tables of ownership, open in one process."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence

from spillover.errors import Collected, Corrupt, InputError, Mismatch, StateError
from spillover.pool.database import open_database, require_sound, transaction, translated
from spillover.pool.folder import Folder
from spillover.pool.ledger import SCHEMA, VERSION, Ledger
from spillover.pool.reader import Reader
from spillover.pool.reference import Ref
from spillover.pool.relocation import encode_moved

__all__ = ["Catalogue"]

NAME = "catalogue.sqlite"


class Catalogue:
    """Who owns what, and which packs are on their way out.

    Args:
        folder: the pool.
        generation: of the process that owns the database.

    Attributes:
        ledger: ownership, for use inside `changing`.
    """

    def __init__(self, folder: Folder, generation: int) -> None:
        self.folder = folder
        self.path = folder.path / NAME
        self.ledger = Ledger(folder, Reader(folder))
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._sound = False
        self._connection = open_database(self.path, generation, SCHEMA, VERSION)
        with self.changing() as cursor:
            self.ledger.load(cursor)
            self.publish_moved(cursor)

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Cursor]:
        """One transaction, durable at the end of the block. Threads take turns."""
        self._require_own()
        with self._lock:
            try:
                with transaction(self._connection, self.path) as cursor:
                    yield cursor
            except BaseException:  # the ledger may have seen what was undone
                with contextlib.suppress(sqlite3.Error):
                    self.ledger.load(self._connection.cursor())
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Cursor]:
        """A cursor to look with. Threads take turns."""
        self._require_own()
        with self._lock, translated(self.path):
            yield self._connection.cursor()

    def require_sound(self) -> None:
        """Check the database, the first time: before anything is deleted on its word.

        Raises:
            Corrupt: it is damaged.
        """
        with self._lock:
            if not self._sound:
                require_sound(self._connection, self.path, SCHEMA)
                self._sound = True

    def retain(self, owners: Mapping[str, Sequence[Ref]]) -> None:
        """Let each name own its publications, besides what it owns already; all or none.

        Raises:
            Collected: one of them is gone.
            Mismatch: one belongs to another pool.
        """
        with self.changing() as cursor:
            for name, refs in owners.items():
                if not refs:
                    continue
                _require_text(name)
                cursor.execute("INSERT INTO names(name) VALUES(?) ON CONFLICT DO NOTHING", (name,))
                ((owner,),) = cursor.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchall()
                self.ledger.own_many(cursor, owner, refs)
                cursor.executemany(
                    "INSERT OR IGNORE INTO roots VALUES(?, ?)", [(owner, ref.pack_bytes()) for ref in refs]
                )

    def complete(self, refs: Sequence[Ref]) -> list[Ref]:
        """Those that can be owned: neither they nor what they depend on are gone or torn."""
        found = []
        with self.reading():
            for ref in refs:
                with contextlib.suppress(Collected, Corrupt, Mismatch):
                    self.ledger.closure(ref)
                    found.append(ref)
        return found

    def release(self, names: Sequence[str]) -> None:
        """Let the names own nothing any more; names that there are not are fine."""
        with self.changing() as cursor:
            for name in names:
                for (owner,) in cursor.execute("SELECT id FROM names WHERE name = ?", (name,)).fetchall():
                    self.ledger.disown_many(cursor, owner)
                    cursor.execute("DELETE FROM roots WHERE owner = ?", (owner,))
                    cursor.execute("DELETE FROM names WHERE id = ?", (owner,))

    def owned(self, name: str) -> list[Ref]:
        """What was retained for a name, as it was given."""
        with self.reading() as cursor:
            query = "SELECT ref FROM roots JOIN names ON owner = id WHERE name = ? ORDER BY ref"
            return [Ref.from_bytes(ref) for (ref,) in cursor.execute(query, (name,))]

    def names(self) -> list[str]:
        """The names that own something, sorted."""
        with self.reading() as cursor:
            return [name for (name,) in cursor.execute("SELECT name FROM names ORDER BY name")]

    def publish_moved(self, cursor: sqlite3.Cursor) -> None:
        """Write the file ``moved`` for readers, if it does not say what the table says."""
        rows = cursor.execute("SELECT old_pool, old_pack, pack FROM moved").fetchall()
        data, path = encode_moved(rows), self.folder.moved
        if (path.read_bytes() != data) if path.exists() else rows:
            self.folder.replace_moved(data)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, to which none of this belongs."""
        return self._process != os.getpid()

    def _require_own(self) -> None:
        if self.inherited:
            raise StateError("a pool's owners cannot be used in a forked process", hint="ask the parent")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self.ledger.rest()
            self._connection.close()


def _require_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name!r} cannot own anything: it is no text that UTF-8 can hold") from None
