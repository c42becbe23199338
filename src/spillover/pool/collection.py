"""Deleting what nobody owns, while everybody works on.

Guarantee: a pack goes only when it is sealed, nobody owns anything in it, no reader has it open, and its
writer is gone or has settled every publication in it.

Steps: remove what dead processes left half written; retire writers whose process is dead; list the packs,
and only then the writers that are still registered, since a writer registers before it makes a pack;
choose; lock each chosen pack alone, which fails while a reader or its writer holds it; record the deletion,
durably; unlink; sync the folder; forget the rows. A crash between two steps leaves a pack that the next
collection deletes again, never one that is missed by somebody: from the record on nobody can own anything
in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from spillover.errors import Corrupt, LockContended
from spillover.pool import gate
from spillover.pool.blocks import Place, read_seal
from spillover.pool.catalogue import Catalogue
from spillover.pool.extent import Index
from spillover.pool.folder import Folder
from spillover.pool.layout import RELOCATIONS
from spillover.pool.reader import OpenPack, Unbegun
from spillover.pool.reference import Ref, writer_of
from spillover.pool.scan import Extent, reference, survey
from spillover.store.disk import refusal

__all__ = [
    "Collection",
    "PackState",
    "Progress",
    "alone",
    "collect",
    "delete_packs",
    "pack_states",
    "retire",
    "silent",
]

BATCH = 256
"""Packs that are locked at once; each lock takes a descriptor."""
Progress = Callable[[int, int], None]
"""Told of bytes done and bytes in all."""


def silent(done: int, total: int) -> None:
    """A `Progress` that nobody sees."""


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


def collect(
    catalogue: Catalogue,
    *,
    dry_run: bool = False,
    looked: Progress = silent,
    deleting: Progress = silent,
) -> Collection:
    """Delete the packs that nobody needs.

    Args:
        dry_run: only say what would be deleted.
        looked: told of bytes of packs that were looked at, and bytes of all of them.
        deleting: told of bytes that were deleted, durably, and bytes to delete.
    """
    damaged: list[str] = []
    retired = 0
    if not dry_run:
        catalogue.folder.sweep()
        retired = _retire_dead(catalogue.folder)
    states = pack_states(catalogue, damaged, looked)
    if dry_run:
        states += _left_by_dead(catalogue, {state.pack for state in states})
    dead = [state for state in states if state.status != "sealed" or not state.owned]
    deleted = dead if dry_run else delete_packs(catalogue, dead, deleting)
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
    try:
        for file in sorted(folder.list_packs()):
            if writer_of(file.pack) == writer:
                found += _whole(folder, file.pack)
        folder.disk.sync_folder(folder.packs)
    except OSError as error:
        raise refusal(error, str(folder.packs)) from error
    return found


def _whole(folder: Folder, number: int) -> list[Ref]:
    """The publications of a pack that are whole, made durable: their writer may have died before it was.

    Copies that its writer made of others are none: they stay under their first address, or are nobody's.
    """
    try:
        pack = OpenPack(folder, number)
    except (FileNotFoundError, Unbegun):
        return []
    folder.disk.sync_data(pack.file)
    found: list[Extent] = []

    def add(extent: Extent, index: Index) -> None:
        if extent.header.writer == writer_of(number) and not extent.header.flags & RELOCATIONS:
            found.append(extent)

    survey(pack, lambda damage: None, whole=add)
    path = pack.path
    return [reference(folder, number, Place(pack.file, path, extent.offset), extent) for extent in found]


def pack_states(catalogue: Catalogue, damaged: list[str], progress: Progress = silent) -> list[PackState]:
    """All sealed packs. Those that are new here get their row, those that are gone lose it.

    Args:
        damaged: gets a line for each that cannot be looked at.
        progress: told of bytes of packs looked at or known, and of all of them.
    """
    folder = catalogue.folder
    catalogue.require_sound()
    catalogue.ledger.rest()
    files = {file.pack: file for file in folder.list_packs()}
    writers = {*folder.list_writers()}  # after the packs: a writer registers before it makes one
    with catalogue.reading() as cursor:
        known = {pack for (pack,) in cursor.execute("SELECT id FROM packs")}
    new = []
    total = sum(file.size for file in files.values())
    done = sum(file.size for pack, file in files.items() if pack in known)
    progress(done, total)
    for pack in files.keys() - known:
        done += files[pack].size
        progress(done, total)
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


def delete_packs(
    catalogue: Catalogue, states: Sequence[PackState], progress: Progress = silent
) -> list[PackState]:
    """Delete packs that no reader has open; returns those that went.

    Args:
        progress: told of bytes of packs that are dealt with, durably, and of all of them.
    """
    deleted: list[PackState] = []
    done, total = 0, sum(state.size for state in states)
    for first in range(0, len(states), BATCH):
        batch = states[first : first + BATCH]
        deleted += _delete(catalogue, batch)
        done += sum(state.size for state in batch)
        progress(done, total)
    return deleted


def _delete(catalogue: Catalogue, states: Sequence[PackState]) -> list[PackState]:
    folder = catalogue.folder
    with contextlib.ExitStack() as locks:
        deleted = _record(catalogue, states, locks)
        if not deleted:
            return []
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


def _record(
    catalogue: Catalogue, states: Sequence[PackState], locks: contextlib.ExitStack
) -> list[PackState]:
    """Lock packs and record their deletion durably, but not of those that are owned or open by now.

    In one transaction: a thread that retains something opens packs while it has the catalogue, and must not
    meet a lock that is held by a thread waiting for the catalogue.
    """
    chosen: list[PackState] = []
    with catalogue.changing() as cursor:
        catalogue.ledger.rest()
        for state in states:
            owned = cursor.execute("SELECT 1 FROM owned WHERE pack = ?", (state.pack,)).fetchone()
            if state.status != "sealed" or owned is None:
                with contextlib.suppress(LockContended):
                    locks.enter_context(alone(catalogue.folder, state.pack))
                    chosen.append(state)
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


def _left_by_dead(catalogue: Catalogue, known: set[int]) -> list[PackState]:
    """The packs that would be looked at besides ``known`` if dead writers were retired first."""
    folder, found = catalogue.folder, []
    dead = {writer for writer in folder.list_writers() if not gate.alive(folder, writer)}
    for file in folder.list_packs():
        if writer_of(file.pack) in dead and file.pack not in known:
            with catalogue.reading() as cursor:
                query = "SELECT 1 FROM owned WHERE pack = ?"
                owned = cursor.execute(query, (file.pack,)).fetchone() is not None
            found.append(PackState(file.pack, file.size, file.size, owned, "sealed"))
    return found


def _look(folder: Folder, pack: int, *, alive: bool) -> tuple[int, int] | None:
    """Id and end of a pack that is sealed, or whose writer is gone; else None.

    Raises:
        Corrupt: it cannot be read.
    """
    try:
        opened = OpenPack(folder, pack)
    except FileNotFoundError:
        return None
    except Unbegun:
        return None if alive else (pack, 0)
    seal = read_seal(opened.file, opened.path)
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
