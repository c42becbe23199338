"""Carrying publications, with all that they depend on, to another pool.

What travels is one file: a sealed pack of the source pool, whose relocation table says which address each
extent had there, and whose metadata names the owners. The destination copies it into packs of its own and
answers for the old addresses from then on, so that every reference stays valid as it is, those inside
payloads included.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from spillover.errors import Collected, Corrupt, InputError, Mismatch
from spillover.pool.blocks import Place, read_index, read_seal
from spillover.pool.catalogue import Catalogue
from spillover.pool.compaction import lead, register
from spillover.pool.folder import Folder
from spillover.pool.intake import Intake, copied, relocation_draft
from spillover.pool.layout import HEADER, PackHeader, Seal
from spillover.pool.quota import Quota
from spillover.pool.reader import OpenPack, Reader
from spillover.pool.reference import Ref
from spillover.pool.relocation import addresses_of
from spillover.pool.scan import extent_at
from spillover.pool.writer import PACK_BYTES
from spillover.store.disk import refusal

__all__ = ["Transfer", "export_pool", "import_pool"]

Progress = Callable[[int, int], None]


class Transfer(msgspec.Struct, frozen=True):
    """What an export or import did.

    Attributes:
        pool: id of the source pool.
        owners: the names that travelled.
        publications: how many were written; those that the destination had already are not.
        bytes: what they take.
    """

    pool: str
    owners: list[str]
    publications: int
    bytes: int


def export_pool(
    folder: Folder,
    owners: Mapping[str, Sequence[Ref]],
    target: Path,
    progress: Progress = lambda done, total: None,
) -> Transfer:
    """Write what ``owners`` own, and all that it depends on, to the file ``target``.

    Args:
        progress: told of bytes written and bytes to write.

    Raises:
        InputError: ``target`` exists.
        Collected: something is gone. Nothing was written, as after every other error.
        Corrupt: something is damaged.
    """
    if target.exists():
        raise InputError(f"{target} exists", hint="choose another name, or delete it")
    with Reader(folder) as reader:
        refs = [ref for found in owners.values() for ref in found]
        with reader.pin(refs):
            placed = _placed(reader, refs)
            partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
            try:
                size = _write(folder, placed, owners, partial, progress)
                folder.disk.rename(partial, target)
                folder.disk.sync_folder(target.parent)
            except OSError as error:
                raise refusal(error, str(target)) from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(partial)
    return Transfer(folder.identity.id, sorted(owners), sum(map(len, placed.values())), size)


def import_pool(
    catalogue: Catalogue,
    source: Path,
    *,
    pack_bytes: int = PACK_BYTES,
    progress: Progress = lambda done, total: None,
) -> Transfer:
    """Take in what an export wrote. The owners it names own it here, besides what they own already.

    Importing again takes in nothing twice. A crash leaves either all of it or copies that belong to nobody.

    Raises:
        InputError: ``source`` cannot be read.
        Corrupt: it is damaged, cut off, or no export.
        StoreFull: no room.
    """
    folder = catalogue.folder
    with _opened(source) as place:
        header = PackHeader.decode(os.pread(place.file, HEADER, 0), place.path)
        seal = read_seal(place.file, place.path)
        if seal is None or not seal.relocations:
            raise Corrupt(f"{source} is cut off, or is no export", hint="export it again")
        owners = _owners(place, seal)
        addresses = addresses_of(place)
        with Intake(folder, pack_bytes, Quota(folder)) as intake, Reader(folder) as reader:
            for offset, found in sorted(addresses.items()):
                here = place._replace(offset=offset)
                extent = extent_at(here, seal.end)
                check = int.from_bytes(read_index(here, extent.header.length).trailer.digest[:8], "little")
                known = (Ref(*address, extent.header.length, check) for address in found)
                if not any(_here(catalogue, reader, ref) for ref in known):
                    intake.add(copied(here, extent), found)
                progress(extent.stop, seal.end)
            taken = intake.finish()
            with catalogue.changing() as cursor:
                register(cursor, taken)
                lead(cursor, {row[:3]: (new.pack, row[3]) for new in taken for row in new.rows})
                catalogue.publish_moved(cursor)
            catalogue.retain(owners)
        return Transfer(
            header.pool.hex(),
            sorted(owners),
            sum(len({row[3] for row in new.rows}) for new in taken),
            intake.copied,
        )


def _placed(reader: Reader, refs: Sequence[Ref]) -> dict[int, set[int]]:
    """By pack, the offsets of everything that ``refs`` need."""
    placed: dict[int, set[int]] = {}
    todo = [*refs]
    while todo:
        ref = todo.pop()
        pack, offset = reader.place(ref)
        if offset not in placed.setdefault(pack, set()):
            placed[pack].add(offset)
            todo += reader.index(ref).dependencies()
    return placed


def _write(
    folder: Folder,
    placed: Mapping[int, set[int]],
    owners: Mapping[str, Sequence[Ref]],
    target: Path,
    progress: Progress,
) -> int:
    """Write the export file and sync it; returns its size."""
    disk, rows, end = folder.disk, [], HEADER
    packs = {pack: OpenPack(folder, pack) for pack in placed}
    total = sum(
        extent_at(Place(packs[pack].file, "", offset), packs[pack].size).header.length
        for pack, offsets in placed.items()
        for offset in offsets
    )
    file = disk.open(target)
    try:
        disk.write_at(file, [PackHeader(folder.id, 0, 0).encode()], 0)
        for pack, offsets in sorted(placed.items()):
            place = Place(packs[pack].file, packs[pack].path, 0)
            known = addresses_of(place)
            for offset in sorted(offsets):
                here = place._replace(offset=offset)
                copy = copied(here, extent_at(here, packs[pack].size))
                disk.write_at(file, copy.parts, end)
                rows += [(*address, end) for address in known.get(offset, [(folder.short, pack, offset)])]
                end += copy.length
                progress(end - HEADER, total)
        named = {name: [str(ref) for ref in refs] for name, refs in owners.items()}
        table = relocation_draft(rows, 0, {"owners": named})
        seal = Seal(end + table.length, sum(map(len, placed.values())) + 1, end)
        disk.write_at(file, [*table.parts, seal.encode()], end)
        disk.sync(file)
        return seal.end + HEADER
    finally:
        os.close(file)


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[Place]:
    try:
        file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{source}: {os.strerror(error.errno or 0)}") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InputError(f"{source} is no file")
        yield Place(file, str(source), 0)
    finally:
        os.close(file)


def _owners(place: Place, seal: Seal) -> dict[str, list[Ref]]:
    """The names that an export travels under, and what they own."""
    index = read_index(place._replace(offset=seal.relocations), seal.end - seal.relocations)
    named = (index.metadata(index.entry(0)) or {}).get("owners", {})
    return {name: [Ref.parse(ref) for ref in refs] for name, refs in named.items()}


def _here(catalogue: Catalogue, reader: Reader, ref: Ref) -> bool:
    """Whether the pool has what an address leads to, and does not delete it at this moment."""
    try:
        reader.require(ref, catalogue.ledger.gone)
    except (Collected, Corrupt, Mismatch):
        return False
    return True
