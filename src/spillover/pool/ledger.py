"""Who owns which extent: the rows behind retain and release.

Every call works inside the caller's transaction, so that a queue changes a task and the ownership of its
payloads in one commit. An owner is a number: names have one in the table ``names``, a queue takes others.

An extent has a row from the first time that somebody owns it until its pack is gone. What an owner owns
includes everything that its publications depend on.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from spillover.pool.folder import Folder
from spillover.pool.reader import Reader
from spillover.pool.reference import Ref

__all__ = ["SCHEMA", "VERSION", "Ledger"]

VERSION = 1
SCHEMA = """
CREATE TABLE packs(
    id INTEGER PRIMARY KEY,
    status TEXT NOT NULL CHECK(status IN ('sealed', 'moved', 'deleting')),
    stop INTEGER NOT NULL,
    extents INTEGER NOT NULL
);
CREATE TABLE extents(
    id INTEGER PRIMARY KEY,
    pack INTEGER NOT NULL,
    place INTEGER NOT NULL,
    length INTEGER NOT NULL,
    owners INTEGER NOT NULL DEFAULT 0,
    UNIQUE(pack, place)
);
CREATE TABLE owned(owner INTEGER NOT NULL, extent INTEGER NOT NULL, PRIMARY KEY(owner, extent)) WITHOUT ROWID;
CREATE TABLE names(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE roots(owner INTEGER NOT NULL, ref BLOB NOT NULL, PRIMARY KEY(owner, ref)) WITHOUT ROWID;
CREATE TABLE moved(
    old_pool INTEGER NOT NULL,
    old_pack INTEGER NOT NULL,
    pack INTEGER NOT NULL,
    PRIMARY KEY(old_pool, old_pack, pack)
) WITHOUT ROWID;
CREATE TRIGGER gained AFTER INSERT ON owned BEGIN
    UPDATE extents SET owners = owners + 1 WHERE id = new.extent;
END;
CREATE TRIGGER lost AFTER DELETE ON owned BEGIN
    UPDATE extents SET owners = owners - 1 WHERE id = old.extent;
END;
"""
CLOSURES = 1 << 16
Placed = tuple[int, int, int]
"""Pack, offset and length of an extent where it lies now."""


class Ledger:
    """Ownership of extents.

    Args:
        folder: the pool.
        reader: finds extents and their dependencies; keeps nothing open between calls.
    """

    def __init__(self, folder: Folder, reader: Reader) -> None:
        self._folder = folder
        self._reader = reader
        self._closures: OrderedDict[Ref, list[Placed]] = OrderedDict()
        self.gone: set[int] = set()

    def rest(self) -> None:
        """Keep no pack open: a collection needs them to itself."""
        self._reader.close()

    def load(self, cursor: sqlite3.Cursor) -> None:
        """Read which packs are on their way out."""
        self.gone = {pack for (pack,) in cursor.execute("SELECT id FROM packs WHERE status != 'sealed'")}
        self._closures.clear()

    def own(self, cursor: sqlite3.Cursor, pairs: Iterable[tuple[int, Ref]]) -> None:
        """Make each owner own its publication and all that it depends on.

        Raises:
            Collected: one of them is gone.
            Mismatch: one belongs to another pool.
            Corrupt: one is cut off, or an index that has to be read is damaged.
        """
        rows = [(owner, placed) for owner, ref in pairs for placed in self.closure(ref)]
        cursor.executemany(
            "INSERT INTO extents(pack, place, length) VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
            [placed for _, placed in rows],
        )
        cursor.executemany(
            "INSERT OR IGNORE INTO owned SELECT ?, id FROM extents WHERE pack = ? AND place = ?",
            [(owner, pack, place) for owner, (pack, place, _) in rows],
        )

    def disown(self, cursor: sqlite3.Cursor, owners: Sequence[int]) -> None:
        """Let the owners own nothing any more."""
        cursor.executemany("DELETE FROM owned WHERE owner = ?", [(owner,) for owner in owners])

    def refuse(self, cursor: sqlite3.Cursor, refs: Iterable[Ref]) -> None:
        """Note that nobody will own these publications, so that their writer holds them no longer."""
        cursor.executemany(
            "INSERT INTO extents(pack, place, length) VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
            [placed for ref in refs for placed in self.closure(ref)[:1]],
        )

    def closure(self, ref: Ref) -> list[Placed]:
        """Where a publication lies, and then everything that it depends on."""
        if not ref.linked:
            return [self._place(ref)]
        key = ref.whole()
        if (known := self._closures.get(key)) is None:
            known = self._follow(key)
            self._closures[key] = known
            if len(self._closures) > CLOSURES:
                self._closures.popitem(last=False)
        return known

    def _follow(self, ref: Ref) -> list[Placed]:
        found: dict[Placed, None] = {}
        todo = [ref]
        while todo:
            ref = todo.pop()
            placed = self._place(ref)
            if placed not in found:
                found[placed] = None
                if ref.linked:
                    todo += self._reader.index(ref).dependencies()
        return [*found]

    def _place(self, ref: Ref) -> Placed:
        pack, offset = self._reader.place(ref, self.gone)
        return pack, offset, ref.length
