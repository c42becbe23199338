"""Going through a pack from its first byte to its last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spillover.errors import Corrupt
from spillover.pool.blocks import PIECE, Place, read_index, read_payload, read_seal
from spillover.pool.extent import Index
from spillover.pool.folder import Folder
from spillover.pool.layout import ALIGN, HEADER, ExtentHeader, Trailer, padding
from spillover.pool.reader import OpenPack
from spillover.pool.reference import Ref
from spillover.pool.writer import submission_key

__all__ = ["Extent", "Survey", "extent_at", "extents", "receipt", "reference", "survey", "verify_extent"]

Damage = Callable[[Corrupt], None]


class Extent(NamedTuple):
    """An extent that a scan came upon."""

    offset: int
    header: ExtentHeader

    @property
    def stop(self) -> int:
        """Where the next one begins."""
        return self.offset + self.header.length


class Survey(NamedTuple):
    """What a pack holds.

    Attributes:
        end: where its last whole extent ends.
        extents: how many there are.
        sealed: whether its writer sealed it.
        torn: bytes behind ``end`` that belong to nothing: a publication that was cut off.
    """

    end: int
    extents: int
    sealed: bool
    torn: int


def extents(pack: OpenPack, stop: int) -> Iterator[Extent]:
    """The extents before ``stop``, by their headers alone.

    Raises:
        Corrupt: a header is damaged, or an extent reaches beyond ``stop``.
    """
    offset = HEADER
    while offset < stop:
        extent = extent_at(Place(pack.file, str(pack.path), offset), stop)
        yield extent
        offset = extent.stop


def survey(pack: OpenPack, damage: Damage, progress: Callable[[int], None] = lambda size: None) -> Survey:
    """Check every byte of a pack.

    In a pack without a seal the first thing that does not check is the end: a publication that was never
    acknowledged. In a sealed pack it is damage, and the scan goes on behind it.

    Args:
        damage: told of everything that is damaged.
        progress: told of bytes as they are checked.
    """
    sealed, stop = _end(pack, damage)
    offset, count = HEADER, 0
    while offset < stop:
        place = Place(pack.file, str(pack.path), offset)
        following = offset
        try:
            extent = extent_at(place, stop)
            following = extent.stop
            verify_extent(place, extent.header)
            count += 1
        except Corrupt as error:
            if not sealed:
                break
            damage(error)
            if following == offset:
                following = _next_header(place, stop)
        progress(following - offset)
        offset = following
    return Survey(offset, count, sealed, 0 if sealed else stop - offset)


def _end(pack: OpenPack, damage: Damage) -> tuple[bool, int]:
    """Whether the pack was sealed, and where its extents end at the latest."""
    size = os.fstat(pack.file).st_size
    try:
        seal = read_seal(pack.file, str(pack.path))
    except Corrupt as error:
        damage(error)
        return True, size - HEADER
    return (True, seal.end) if seal else (False, size)


def extent_at(place: Place, stop: int) -> Extent:
    """The extent that begins at ``place`` and ends by ``stop``, by its header alone.

    Raises:
        Corrupt: there is none.
    """
    header = ExtentHeader.decode(os.pread(place.file, HEADER, place.offset), str(place))
    if not 3 * HEADER <= header.length <= stop - place.offset or header.length % ALIGN:
        raise Corrupt(f"{place} is cut off: the pack ends before it")
    return Extent(place.offset, header)


def _next_header(place: Place, stop: int) -> int:
    """Where the next whole extent header behind ``place`` lies; ``stop`` if there is none."""
    for offset in range(place.offset + ALIGN, stop, ALIGN):
        with contextlib.suppress(Corrupt):
            return extent_at(place._replace(offset=offset), stop).offset
    return stop


def verify_extent(place: Place, header: ExtentHeader) -> Index:
    """Check every byte of an extent: index, payloads, and the zeros between them.

    Raises:
        Corrupt: the first thing that is damaged.
    """
    index = read_index(place, header.length)
    if Trailer(header.flags, header.length, header.index_at, *index.trailer[3:]) != index.trailer:
        raise Corrupt(f"header and trailer of {place} do not belong together")
    end = HEADER
    buffer = memoryview(bytearray(PIECE))
    for entry in index.entries():
        if entry.kind:
            continue
        for start in range(0, entry.length, PIECE):
            read_payload(place, index, entry, start, buffer[: min(PIECE, entry.length - start)])
        gap = padding(entry.length)
        if entry.start != end or os.pread(place.file, gap, place.offset + end + entry.length).strip(b"\0"):
            raise Corrupt(f"{place}: the gap behind record {index.id(entry)!r} is damaged")
        end += entry.length + gap
    if end != header.index_at:
        raise Corrupt(f"the records of {place} do not fill it")
    return index


def receipt(folder: Folder, submission: str) -> list[Ref] | None:
    """The references of a submission whose answer was lost; None if it is not whole.

    Looks at the header of every extent of the pool.
    """
    key, parts = submission_key(submission), None
    found: dict[int, Ref] = {}
    for file in folder.list_packs():
        try:
            pack = OpenPack(folder, file.pack)
        except (FileNotFoundError, Corrupt):
            continue
        try:
            for extent in extents(pack, file.size):
                if extent.header.submission == key:
                    place = Place(pack.file, str(pack.path), extent.offset)
                    found[extent.header.part] = reference(folder, file.pack, place, extent)
                    parts = extent.header.parts
        except Corrupt:  # the seal, or what was cut off
            continue
    if parts is None or len(found) < parts:
        return None
    return [found[part] for part in range(parts)]


def reference(folder: Folder, pack: int, place: Place, extent: Extent) -> Ref:
    """The reference of an extent that a scan came upon, after checking its index."""
    index = read_index(place, extent.header.length)
    check = int.from_bytes(index.trailer.digest[:8], "little")
    linked = bool(index.trailer.dependencies)
    return Ref(folder.short, pack, extent.offset, extent.header.length, check, None, linked)
