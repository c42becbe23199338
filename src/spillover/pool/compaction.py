"""Rewriting packs of which little is owned.

Guarantee: what is owned stays readable under its old reference at every instant, and after a crash at any
point either the old pack or the new one counts, never neither.

Steps: copy what is owned into new packs; check them from the disk; record, in one transaction, where the
extents lie now and that the old packs are replaced; write the file ``moved`` for readers; delete the old
packs as a collection does. Before the transaction the copies belong to nobody, and a crash leaves them to
the next collection. What somebody begins to own while its pack is being copied makes that pack stay as it
is until the next time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from spillover.errors import Corrupt, LockContended
from spillover.pool.blocks import Place, read_seal
from spillover.pool.catalogue import Catalogue
from spillover.pool.collection import PackState, alone, delete_packs, pack_states
from spillover.pool.folder import Folder
from spillover.pool.intake import Intake, Taken, copied
from spillover.pool.layout import HEADER
from spillover.pool.quota import Unlimited
from spillover.pool.reader import OpenPack
from spillover.pool.reference import writer_of
from spillover.pool.relocation import addresses_of
from spillover.pool.scan import extent_at
from spillover.pool.writer import PACK_BYTES

__all__ = ["Compaction", "compact"]

MIN_OWNED = 0.5
Address = tuple[int, int, int]
"""Pool, pack and offset, as a reference names them."""


class Compaction(msgspec.Struct, frozen=True):
    """What a compaction did.

    Attributes:
        rewritten: packs that were replaced.
        made: packs that took over what they held.
        copied: bytes of extents copied.
        freed: bytes of the packs that were deleted.
        held: replaced packs that a reader still has open; the next collection deletes them.
        damaged: packs that could not be copied, and why.
    """

    rewritten: int
    made: int
    copied: int
    freed: int
    held: int
    damaged: list[str]


class _Source(NamedTuple):
    """A pack that was copied: the extents that were, and all old addresses that led to each."""

    state: PackState
    extents: dict[int, list[Address]]


def compact(
    catalogue: Catalogue,
    *,
    min_owned: float = MIN_OWNED,
    pack_bytes: int = PACK_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Compaction:
    """Rewrite the packs of which less than ``min_owned`` of the bytes are owned, but some.

    Args:
        pack_bytes: size at which a new pack is sealed.
        progress: told of bytes copied and bytes to copy.
    """
    damaged: list[str] = []
    chosen = _choose(catalogue, min_owned, damaged)
    total = sum(chosen.values())
    sources: list[_Source] = []
    done = 0
    with Intake(catalogue.folder, pack_bytes, Unlimited(catalogue.folder)) as intake:
        for state, owned in sorted(chosen.items(), key=lambda pair: pair[1] / pair[0].size):
            try:
                sources.append(_copy(catalogue, state, intake))
            except Corrupt as error:
                damaged.append(str(error))
            done += owned
            progress(done, total)
        taken = intake.finish()
        replaced = _record(catalogue, sources, taken)
    deleted = delete_packs(catalogue, replaced)
    return Compaction(
        len(replaced),
        len(taken) if replaced else 0,
        intake.copied,
        sum(state.size for state in deleted),
        len(replaced) - len(deleted),
        damaged,
    )


def _choose(catalogue: Catalogue, min_owned: float, damaged: list[str]) -> dict[PackState, int]:
    """The packs to rewrite, and how many bytes of each are owned.

    What a live writer has not settled must stay where it is: nobody owns it yet, but somebody may.
    """
    folder, chosen = catalogue.folder, {}
    writers = {*folder.list_writers()}
    for state in pack_states(catalogue, damaged):
        if state.status != "sealed" or not state.owned:
            continue
        with catalogue.reading() as cursor:
            query = "SELECT SUM(length) FROM (SELECT DISTINCT place, length FROM owned WHERE pack = ?)"
            ((owned,),) = cursor.execute(query, (state.pack,)).fetchall()
        if not owned or owned >= min_owned * (_filled(folder, state, damaged) or owned):
            continue
        if writer_of(state.pack) in writers:
            with contextlib.suppress(LockContended), alone(folder, state.pack):
                chosen[state] = owned
        else:
            chosen[state] = owned
    return chosen


def _filled(folder: Folder, state: PackState, damaged: list[str]) -> int:
    """Bytes that publications take in a pack, with what a dead writer left behind; 0 if it cannot be read."""
    try:
        pack = OpenPack(folder, state.pack)
        seal = read_seal(pack.file, pack.path)
    except Corrupt as error:
        damaged.append(str(error))
        return 0
    except FileNotFoundError:
        return 0
    if seal is None:
        return pack.size - HEADER
    return (seal.relocations or state.stop) - HEADER


def _copy(catalogue: Catalogue, state: PackState, intake: Intake) -> _Source:
    """Hand everything that is owned in a pack to ``intake``.

    Raises:
        Corrupt: an extent is damaged, so that the pack cannot be replaced.
    """
    folder = catalogue.folder
    pack = OpenPack(folder, state.pack)
    place = Place(pack.file, pack.path, 0)
    with catalogue.reading() as cursor:
        source = _Source(state, {offset: [] for offset in _owned(cursor, state.pack)})
    aliases = addresses_of(place)
    for offset, addresses in source.extents.items():
        addresses += aliases.get(offset, [(folder.short, state.pack, offset)])  # what references name
        here = place._replace(offset=offset)
        intake.add(copied(here, extent_at(here, state.stop)), addresses)
    return source


def _record(catalogue: Catalogue, sources: Sequence[_Source], taken: Sequence[Taken]) -> list[PackState]:
    """Let the new packs take the place of the old ones; returns those that were replaced."""
    places = {row[:3]: (new.pack, row[3]) for new in taken for row in new.rows}
    with catalogue.changing() as cursor:
        replaced = [
            source for source in sources if _owned(cursor, source.state.pack) <= source.extents.keys()
        ]
        register(cursor, taken if replaced else [])
        for state, extents in replaced:
            cursor.executemany(
                "UPDATE owned SET pack = ?, place = ? WHERE pack = ? AND place = ?",
                [(*places[found[0]], state.pack, offset) for offset, found in extents.items()],
            )
            cursor.execute("UPDATE packs SET status = 'moved' WHERE id = ?", (state.pack,))
            lead(cursor, {address: places[address] for found in extents.values() for address in found})
        catalogue.ledger.load(cursor)
        catalogue.publish_moved(cursor)
    return [source.state._replace(status="moved") for source in replaced]


def register(cursor: sqlite3.Cursor, taken: Sequence[Taken]) -> None:
    """Enter new packs."""
    cursor.executemany("INSERT INTO packs VALUES(?, 'sealed', ?)", [(new.pack, new.stop) for new in taken])


def lead(cursor: sqlite3.Cursor, places: Mapping[Address, tuple[int, int]]) -> None:
    """Enter which packs answer for old addresses."""
    rows = {(pool, pack, new) for (pool, pack, _), (new, _) in places.items()}
    cursor.executemany("INSERT OR IGNORE INTO moved VALUES(?, ?, ?)", sorted(rows))


def _owned(cursor: sqlite3.Cursor, pack: int) -> set[int]:
    """Offsets of the extents of a pack that somebody owns."""
    query = "SELECT DISTINCT place FROM owned WHERE pack = ?"
    return {place for (place,) in cursor.execute(query, (pack,))}
