"""Deleting what nobody owns, while everybody works on.

Guarantee: a pack goes only when it is sealed, nobody owns anything in it, no reader has it open, and its
writer is gone or has settled every publication in it.

Steps: retire writers whose process is dead; list the packs, and only then the writers that are still
registered, since a writer registers before it makes a pack; choose; lock each chosen pack alone, which
fails while a reader or its writer holds it; record the deletion, durably; unlink; sync the folder; forget
the rows. A crash between two steps leaves a pack that the next collection deletes again, never one that is
missed by somebody: from the record on nobody can own anything in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from spillover.errors import Corrupt, LockContended
from spillover.pool import gate
from spillover.pool.blocks import Place, read_seal
from spillover.pool.catalogue import Catalogue
from spillover.pool.folder import Folder
from spillover.pool.reader import OpenPack
from spillover.pool.reference import Ref, writer_of
from spillover.pool.scan import extents, reference, survey
from spillover.store.disk import refusal

__all__ = ["Collection", "PackState", "alone", "collect", "delete_packs", "pack_states", "retire"]


class Collection(msgspec.Struct, frozen=True):
    """What a collection did, or would do.

    Attributes:
        deleted: packs deleted.
        freed: their bytes.
        held: packs that nobody owns, but a reader has open or their writer has not settled.
        packs: packs that remain.
        bytes: what they take.
        retired: writers that were found dead.
        damaged: packs that could not be looked at, and why.
    """

    deleted: int
    freed: int
    held: int
    packs: int
    bytes: int
    retired: int
    damaged: list[str]


class PackState(NamedTuple):
    """A sealed pack, as the catalogue and the folder see it.

    Attributes:
        pack: its id.
        size: bytes of its file.
        stop: where its extents end.
        owned: whether somebody owns anything in it.
        status: ``sealed``, ``moved`` or ``deleting``.
    """

    pack: int
    size: int
    stop: int
    owned: bool
    status: str


def collect(catalogue: Catalogue, *, dry_run: bool = False) -> Collection:
    """Delete the packs that nobody needs.

    Args:
        dry_run: only say what would be deleted.
    """
    damaged: list[str] = []
    retired = 0 if dry_run else _retire_dead(catalogue.folder)
    states = pack_states(catalogue, damaged)
    dead = [state for state in states if state.status != "sealed" or not state.owned]
    deleted = dead if dry_run else delete_packs(catalogue, dead)
    left = [*catalogue.folder.list_packs()]
    return Collection(
        len(deleted),
        sum(state.size for state in deleted),
        len(dead) - len(deleted),
        len(left),
        sum(pack.size for pack in left),
        retired,
        damaged,
    )


def retire(folder: Folder, writer: int) -> list[Ref]:
    """End a writer that is dead, and return the publications that are whole in its packs.

    From here on nothing that its process may still write counts.

    Raises:
        LockContended: the writer is alive.
    """
    gate.seize(folder, writer)
    found = []
    for file in folder.list_packs():
        if writer_of(file.pack) != writer:
            continue
        with contextlib.suppress(FileNotFoundError):
            pack = OpenPack(folder, file.pack)
            stop = survey(pack, lambda damage: None).end
            for extent in extents(pack, stop):
                place = Place(pack.file, str(pack.path), extent.offset)
                found.append(reference(folder, file.pack, place, extent))
    return found


def pack_states(catalogue: Catalogue, damaged: list[str]) -> list[PackState]:
    """All sealed packs. Those that are new here get their row, those that are gone lose it."""
    folder = catalogue.folder
    catalogue.ledger.rest()
    files = {file.pack: file for file in folder.list_packs()}
    writers = {*folder.list_writers()}  # after the packs: a writer registers before it makes one
    with catalogue.reading() as cursor:
        known = {pack for (pack,) in cursor.execute("SELECT id FROM packs")}
    new = []
    for pack in files.keys() - known:
        try:
            row = _look(folder, pack, alive=writer_of(pack) in writers)
        except Corrupt as error:
            damaged.append(str(error))
            continue
        if row is not None:
            new.append(row)
    with catalogue.changing() as cursor:
        cursor.executemany("INSERT INTO packs VALUES(?, 'sealed', ?)", new)
        damaged += _missing(cursor, known - files.keys(), folder)
        query = "SELECT id, stop, status, EXISTS(SELECT 1 FROM owned WHERE pack = packs.id) FROM packs"
        rows = cursor.execute(query).fetchall()
    return [
        PackState(pack, files[pack].size, stop, bool(owned), status)
        for pack, stop, status, owned in rows
        if pack in files
    ]


def delete_packs(catalogue: Catalogue, states: Sequence[PackState]) -> list[PackState]:
    """Delete packs that no reader has open; returns those that went."""
    folder, deleted = catalogue.folder, []
    catalogue.ledger.rest()
    with contextlib.ExitStack() as locks:
        for state in states:
            with contextlib.suppress(LockContended):
                locks.enter_context(alone(folder, state.pack))
                deleted.append(state)
        if not deleted:
            return []
        deleted = _record(catalogue, deleted)
        try:
            for state in deleted:
                with contextlib.suppress(FileNotFoundError):
                    folder.disk.unlink(folder.path_of(state.pack))
            folder.disk.sync_folder(folder.packs)
        except OSError as error:
            raise refusal(error, str(folder.packs)) from error
    with catalogue.changing() as cursor:
        _forget(cursor, {state.pack for state in deleted})
        catalogue.ledger.load(cursor)
        catalogue.publish_moved(cursor)
    return deleted


def _record(catalogue: Catalogue, states: list[PackState]) -> list[PackState]:
    """Record the deletions durably, but not of packs of which somebody owns something by now."""
    with catalogue.changing() as cursor:
        owned = "SELECT 1 FROM owned WHERE pack = ?"
        chosen = [
            state
            for state in states
            if state.status != "sealed" or cursor.execute(owned, (state.pack,)).fetchone() is None
        ]
        cursor.executemany(
            "UPDATE packs SET status = 'deleting' WHERE id = ?", [(state.pack,) for state in chosen]
        )
        catalogue.ledger.load(cursor)
    return chosen


def _missing(cursor: sqlite3.Cursor, packs: set[int], folder: Folder) -> list[str]:
    """Forget packs whose file is gone; returns a line for each of which somebody owns something."""
    query = "SELECT 1 FROM packs JOIN owned ON pack = id WHERE id = ? AND status = 'sealed'"
    lost = {pack for pack in packs if cursor.execute(query, (pack,)).fetchone()}
    _forget(cursor, packs - lost)
    return [f"{folder.path_of(pack)} is missing, and somebody owns what was in it" for pack in sorted(lost)]


def _forget(cursor: sqlite3.Cursor, packs: set[int]) -> None:
    rows = [(pack,) for pack in packs]
    for table, column in (("owned", "pack"), ("moved", "pack"), ("packs", "id")):
        cursor.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)


def _retire_dead(folder: Folder) -> int:
    """Retire the writers whose process is dead; returns how many."""
    count = 0
    for writer in folder.list_writers():
        with contextlib.suppress(LockContended):
            count += gate.seize(folder, writer)
    return count


def _look(folder: Folder, pack: int, *, alive: bool) -> tuple[int, int] | None:
    """Id and end of a pack that is sealed, or whose writer is gone; else None.

    Raises:
        Corrupt: it cannot be read.
    """
    try:
        opened = OpenPack(folder, pack)
    except FileNotFoundError:
        return None
    except Corrupt:
        if not alive and folder.path_of(pack).stat().st_size <= 64:  # its first write was cut off
            return pack, 0
        raise
    seal = read_seal(opened.file, str(opened.path))
    if seal is not None:
        return pack, seal.end
    if alive:
        return None
    return pack, survey(opened, lambda damage: None).end


@contextlib.contextmanager
def alone(folder: Folder, pack: int) -> Iterator[None]:
    """Hold a pack that no reader has open and that its writer has settled.

    Raises:
        LockContended: one has, or it has not.
    """
    try:
        file = os.open(folder.path_of(pack), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockContended(f"{folder.path_of(pack)} is held by a reader or its writer") from None
        yield
    finally:
        os.close(file)
