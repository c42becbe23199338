"""What is in a pool, described for people and programs.

Sizes are in bytes. References are in their text form (`Ref.parse` reads it).
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillover.errors import Corrupt, InputError, LockContended, StoreRefused
from spillover.pool import codecs
from spillover.pool.blocks import Place
from spillover.pool.extent import Index
from spillover.pool.folder import Folder
from spillover.pool.gate import Resident
from spillover.pool.layout import RELOCATIONS, Entry
from spillover.pool.owners import Owners
from spillover.pool.reader import OpenPack, Reader
from spillover.pool.reference import Ref, pack_id, pack_name
from spillover.pool.relocation import addresses_of
from spillover.pool.scan import Extent, survey
from spillover.state import State
from spillover.store import LocalStore

__all__ = [
    "Figures",
    "OwnerListing",
    "PackListing",
    "PublicationListing",
    "RecordListing",
    "catalogue_owner",
    "figures",
    "list_owners",
    "list_pack",
    "list_publications",
    "pack_named",
]

CODECS = {codecs.BYTES: "bytes", codecs.JSON: "json", codecs.TENSOR: "tensor"}


class RecordListing(msgspec.Struct, frozen=True):
    """A record.

    Attributes:
        id: its name in the publication.
        ref: its reference.
        codec: ``bytes``, ``json``, ``tensor`` or ``link``.
        bytes: of its payload; 0 for a link.
        dtype: of a tensor.
        shape: of a tensor.
        metadata: as it was published.
        target: of a link: the record that it stands for.
    """

    id: str
    ref: str
    codec: str
    bytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    metadata: dict[str, Any] | None = None
    target: str | None = None


class PublicationListing(msgspec.Struct, frozen=True):
    """A publication.

    Attributes:
        ref: its reference, which compaction and import leave as it is.
        pack: name of its pack.
        offset: where it begins there.
        bytes: what it takes there.
        relocations: whether it is the relocation table of its pack, and nothing that anybody published.
        records: in order.
        dependencies: what it keeps alive.
    """

    ref: str
    pack: str
    offset: int
    bytes: int
    relocations: bool
    records: list[RecordListing]
    dependencies: list[str]


class PackListing(msgspec.Struct, frozen=True):
    """A pack.

    Attributes:
        pack: its name.
        bytes: of its file.
        sealed: whether its writer ended it.
        torn: bytes at its end that belong to nothing, or to a publication that is only now being written.
        publications: in order.
    """

    pack: str
    bytes: int
    sealed: bool
    torn: int
    publications: list[PublicationListing]


class OwnerListing(msgspec.Struct, frozen=True):
    """An owner.

    Attributes:
        name: what it is called.
        refs: how many references were retained for it.
        publications: how many it owns by that, dependencies included.
        bytes: what these take.
    """

    name: str
    refs: int
    publications: int
    bytes: int


class Figures(msgspec.Struct, frozen=True):
    """A pool in figures.

    Attributes:
        pool: its id.
        packs: number of pack files.
        bytes: what they take.
        max_bytes: the pool's limit.
        writers: how many writers are registered.
        owners: how many names own something; None, as the next three, if the catalogue could not be opened.
        owned_extents: how many publications somebody owns.
        owned_bytes: what these take.
        replaced: packs that were rewritten and wait for a reader to let go.
        catalogue: the other process that has the catalogue open.
        refused: why the catalogue could not be opened.
    """

    pool: str
    packs: int
    bytes: int
    max_bytes: int | None
    writers: int
    owners: int | None = None
    owned_extents: int | None = None
    owned_bytes: int | None = None
    replaced: int | None = None
    catalogue: Resident | None = None
    refused: str | None = None


def figures(folder: Folder) -> Figures:
    """All figures, or those that the folder alone can tell while the catalogue is out of reach.

    Raises:
        Corrupt: the catalogue is damaged.
    """
    try:
        with Owners(folder) as owners:
            found = owners.stats()
    except (LockContended, StoreRefused) as error:
        packs = [*folder.list_packs()]
        writers = len(folder.list_writers())
        size = sum(pack.size for pack in packs)
        owner = catalogue_owner(folder) if isinstance(error, LockContended) else None
        identity = folder.identity
        return Figures(
            identity.id, len(packs), size, identity.max_bytes, writers, catalogue=owner, refused=str(error)
        )
    return msgspec.convert(msgspec.structs.asdict(found), Figures)


def catalogue_owner(folder: Folder) -> Resident | None:
    """The process that has the catalogue open, as it wrote in the control object; None if none has."""
    document = State(LocalStore(folder.path / "owner")).read()
    if document is None or document.owner is None:
        return None
    return Resident(document.owner.host, document.owner.pid)


def list_owners(owners: Owners) -> list[OwnerListing]:
    """All owners, sorted by name."""
    query = (
        "SELECT name, (SELECT COUNT(*) FROM roots WHERE roots.owner = id), "
        "COUNT(length), COALESCE(SUM(length), 0) "
        "FROM names LEFT JOIN owned ON owned.owner = -id AND owned.owner < 0 GROUP BY id ORDER BY name"
    )
    with owners.catalogue.reading() as cursor:
        return [OwnerListing(*row) for row in cursor.execute(query)]


def list_publications(owners: Owners, name: str) -> list[PublicationListing]:
    """What was retained for an owner.

    Raises:
        InputError: there is no such owner.
        Corrupt: an index is damaged.
    """
    folder = owners.folder
    if name not in owners.names():
        raise InputError(f"{folder.path} has no owner {name!r}", hint=f"spill pool ls {folder.path}")
    with Reader(folder) as reader:
        found = []
        for ref in owners.owned(name):
            found.append(_publication(ref.whole(), reader.place(ref), reader.index(ref), relocations=False))
        return found


def list_pack(folder: Folder, pack: int) -> PackListing:
    """What a pack holds; every byte is checked.

    Raises:
        InputError: there is no such pack.
        Corrupt: the first thing that is damaged.
    """
    try:
        opened = OpenPack(folder, pack)
    except FileNotFoundError:
        raise InputError(f"{folder.path} has no pack {pack_name(pack)}", hint=f"ls {folder.packs}") from None
    damage: list[Corrupt] = []
    whole: list[tuple[Extent, Index]] = []
    found = survey(opened, damage.append, whole=lambda extent, index: whole.append((extent, index)))
    if damage:
        raise damage[0]
    known = addresses_of(Place(opened.file, opened.path, 0))
    listed = [_listed(folder, pack, *held, known.get(held[0].offset, [])) for held in whole]
    return PackListing(pack_name(pack), opened.size, found.sealed, found.torn, listed)


def pack_named(name: str) -> int:
    """The id of the pack with a name, the name of its file, or a path to it.

    Raises:
        InputError: not the name of a pack.
    """
    writer, _, serial = name.rpartition("/")[2].removesuffix(".pack").partition("-")
    try:
        pack = pack_id(int(writer, 16), int(serial, 16))
    except ValueError:
        pack = -1
    if pack < 0 or pack_name(pack) != f"{writer}-{serial}":
        raise InputError(f"{name!r} is not the name of a pack", hint="ls POOL/packs")
    return pack


def _listed(
    folder: Folder, pack: int, extent: Extent, index: Index, addresses: list[tuple[int, int, int]]
) -> PublicationListing:
    check, linked = int.from_bytes(index.trailer.digest[:8], "little"), bool(index.trailer.dependencies)
    here = (pack, extent.offset)
    address = addresses[0] if addresses else (folder.short, *here)
    ref = Ref(*address, extent.header.length, check, None, linked)
    return _publication(ref, here, index, relocations=bool(extent.header.flags & RELOCATIONS))


def _publication(ref: Ref, place: tuple[int, int], index: Index, *, relocations: bool) -> PublicationListing:
    needs = index.dependencies()
    records = [_record(index, entry, ref.at(place), needs) for place, entry in enumerate(index.entries())]
    dependencies = [str(need) for need in needs]
    return PublicationListing(
        str(ref), pack_name(place[0]), place[1], ref.length, relocations, records, dependencies
    )


def _record(index: Index, entry: Entry, ref: Ref, needs: list[Ref]) -> RecordListing:
    name = index.id(entry)
    if entry.kind:
        target = needs[entry.dependency].at(entry.ordinal)
        return RecordListing(name, str(ref), "link", 0, target=str(target))
    codec, metadata = CODECS.get(entry.codec, str(entry.codec)), index.metadata(entry)
    if entry.codec != codecs.TENSOR:
        return RecordListing(name, str(ref), codec, entry.length, metadata=metadata)
    dtype = codecs.dtype_numbered(entry.dtype)
    shown = dtype.name if dtype else str(entry.dtype)
    return RecordListing(name, str(ref), codec, entry.length, shown, index.shape(entry), metadata)
