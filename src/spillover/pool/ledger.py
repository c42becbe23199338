"""Who owns which extent: the rows behind retain and release.

Every call works inside the caller's transaction, so that a queue changes a task and the ownership of its
payloads in one commit. What an owner owns includes everything that its publications depend on. There is one
row for an owner and an extent, and its primary key begins with the pack, so that a collection asks for each
pack whether any row is left.

An owner is a number above zero. Its row is found again from the reference, without an index; but where a
reference leads to several extents, and for names, which may own many, the number is stored negative, and a
partial index over the negative ones finds all rows.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from spillover.errors import Collected
from spillover.pool.folder import Folder
from spillover.pool.reader import Reader
from spillover.pool.reference import Ref

__all__ = ["SCHEMA", "VERSION", "Ledger"]

VERSION = 1
SCHEMA = """
CREATE TABLE packs(
    id INTEGER PRIMARY KEY,
    status TEXT NOT NULL CHECK(status IN ('sealed', 'moved', 'deleting')),
    stop INTEGER NOT NULL
);
CREATE TABLE owned(
    pack INTEGER NOT NULL,
    place INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY(pack, place, owner)
) WITHOUT ROWID;
CREATE INDEX owned_by_many ON owned(owner) WHERE owner < 0;
CREATE TABLE names(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE roots(owner INTEGER NOT NULL, ref BLOB NOT NULL, PRIMARY KEY(owner, ref)) WITHOUT ROWID;
CREATE TABLE moved(
    old_pool INTEGER NOT NULL,
    old_pack INTEGER NOT NULL,
    pack INTEGER NOT NULL,
    PRIMARY KEY(old_pool, old_pack, pack)
) WITHOUT ROWID;
CREATE INDEX moved_to ON moved(pack);
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
        self._insert(
            cursor,
            [
                (-owner if ref.linked else owner, placed)
                for owner, ref in pairs
                for placed in self.closure(ref)
            ],
        )

    def own_many(self, cursor: sqlite3.Cursor, owner: int, refs: Iterable[Ref]) -> None:
        """Like `own` for an owner of many publications, which `disown_many` ends."""
        self._insert(cursor, [(-owner, placed) for ref in refs for placed in self.closure(ref)])

    def disown(self, cursor: sqlite3.Cursor, pairs: Iterable[tuple[int, Ref]]) -> None:
        """Undo `own`."""
        rows: list[tuple[int, int, int]] = []
        for owner, ref in pairs:
            if ref.linked:
                self.disown_many(cursor, owner)
                continue
            with contextlib.suppress(Collected):
                rows.append((*self._reader.place(ref, self.gone), owner))
        cursor.executemany("DELETE FROM owned WHERE pack = ? AND place = ? AND owner = ?", rows)

    def disown_many(self, cursor: sqlite3.Cursor, owner: int) -> None:
        """Let an owner of many publications own nothing any more."""
        cursor.execute("DELETE FROM owned WHERE owner = ? AND owner < 0", (-owner,))

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
        return *self._reader.require(ref, self.gone), ref.length

    def _insert(self, cursor: sqlite3.Cursor, rows: Sequence[tuple[int, Placed]]) -> None:
        cursor.executemany(
            "INSERT OR IGNORE INTO owned VALUES(?, ?, ?, ?)",
            [(pack, place, owner, length) for owner, (pack, place, length) in rows],
        )
