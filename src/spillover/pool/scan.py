"""Going through a pack from its first byte to its last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from spillover.errors import Corrupt
from spillover.pool.blocks import PIECE, Place, read_index, read_payload, read_seal
from spillover.pool.extent import Index
from spillover.pool.folder import Folder, PackFile
from spillover.pool.layout import ALIGN, HEADER, ExtentHeader, Trailer, padding
from spillover.pool.reader import OpenPack
from spillover.pool.reference import Ref, writer_of
from spillover.pool.relocation import addresses_of
from spillover.pool.writer import submission_key
from spillover.store.disk import refusal

__all__ = [
    "Extent",
    "Survey",
    "extent_at",
    "extents",
    "receipt",
    "reference",
    "survey",
    "verify_extent",
]

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
        torn: bytes behind ``end`` that belong to nothing: a publication that was cut off. Zeros that a writer
            has put ahead of its pack's end do not count.
    """

    end: int
    extents: int
    sealed: bool
    torn: int


def extents(pack: OpenPack, stop: int) -> Iterator[Extent]:
    """The extents before ``stop``, by their headers alone. What lies between whole headers is skipped."""
    offset = HEADER
    while offset < stop:
        place = Place(pack.file, pack.path, offset)
        try:
            extent = extent_at(place, stop)
        except Corrupt:
            offset = _next_header(place, stop)
            continue
        yield extent
        offset = extent.stop


def survey(
    pack: OpenPack,
    damage: Damage,
    progress: Callable[[int], None] = lambda size: None,
    whole: Callable[[Extent, Index], None] = lambda extent, index: None,
) -> Survey:
    """Check every byte of a pack.

    In a pack without a seal, what does not check and has nothing whole behind it is a publication that was
    cut off and never acknowledged. Everything else that does not check is damage. (If the power fails while
    several publications share a write, one that is cut off may have a whole one behind it. It counts as
    damage too: to say so is better than to be silent about one that was acknowledged.)

    Args:
        damage: told of everything that is damaged.
        progress: told of bytes as they are checked.
        whole: told of every extent that is whole.
    """
    sealed, stop = _end(pack, damage)
    progress(0 if sealed else max(0, pack.size - stop))
    offset, end, count = HEADER, HEADER, 0
    broken: list[Corrupt] = []
    while offset < stop:
        place = Place(pack.file, pack.path, offset)
        following = offset
        try:
            extent = extent_at(place, stop)
            following = extent.stop
            whole(extent, verify_extent(place, extent.header))
        except Corrupt as error:
            broken.append(error.with_traceback(None))  # whose frames would keep the pack open
            if following == offset:
                following = _next_header(place, stop)
        else:
            count, end = count + 1, following
            _tell(damage, broken)
        progress(following - offset)
        offset = following
    if sealed:
        _tell(damage, broken)
        return Survey(stop, count, True, 0)
    return Survey(end, count, False, stop - end)


def _tell(damage: Damage, broken: list[Corrupt]) -> None:
    for error in broken:
        damage(error)
    broken.clear()


def _end(pack: OpenPack, damage: Damage) -> tuple[bool, int]:
    """Whether the pack was sealed, and where its extents end at the latest."""
    size = os.fstat(pack.file).st_size
    try:
        seal = read_seal(pack.file, pack.path)
    except Corrupt as error:
        damage(error)
        return True, size - HEADER
    return (True, seal.end) if seal else (False, _behind_all(pack, size))


def _behind_all(pack: OpenPack, size: int) -> int:
    """Where nothing but zeros follows, rounded up to where an extent may begin."""
    while size > HEADER:
        start = max(HEADER, size - PIECE)
        if found := len(os.pread(pack.file, size - start, start).rstrip(b"\0")):
            return min(size, start + found + padding(start + found))
        size = start
    return size


def extent_at(place: Place, stop: int) -> Extent:
    """The extent that begins at ``place`` and ends by ``stop``, by its header alone.

    Raises:
        Corrupt: there is none.
    """
    header = ExtentHeader.decode(os.pread(place.file, HEADER, place.offset), str(place))
    if not 2 * HEADER <= header.length <= stop - place.offset or header.length % ALIGN:
        raise Corrupt(f"{place} is cut off: the pack ends before it")
    return Extent(place.offset, header)


def _next_header(place: Place, stop: int) -> int:
    """Where the next whole extent header behind ``place`` lies; ``stop`` if there is none."""
    for start in range(place.offset + ALIGN, stop, PIECE):
        piece = os.pread(place.file, min(PIECE, stop - start), start)
        at = piece.find(b"EXT1")
        while at >= 0:
            if at % ALIGN == 0:
                with contextlib.suppress(Corrupt):
                    return extent_at(place._replace(offset=start + at), stop).offset
            at = piece.find(b"EXT1", at + 1)
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

    Looks at the header of every extent of the pool. What is found is checked whole and made durable: its
    writer may have died before it was.
    """
    key = submission_key(submission)
    found: dict[int, dict[int, Ref]] = {}
    parts = 0
    try:
        for file in folder.list_packs():
            for header, ref in _answers(folder, file, key):
                found.setdefault(header.writer, {})[header.part] = ref
                parts = header.parts
        folder.disk.sync_folder(folder.packs)
    except OSError as error:
        raise refusal(error, str(folder.packs)) from error
    for _, refs in sorted(found.items()):  # one writer's: of another, part may never have been whole
        if len(refs) == parts:
            return [refs[part] for part in range(parts)]
    return None


def _answers(folder: Folder, file: PackFile, key: bytes) -> Iterator[tuple[ExtentHeader, Ref]]:
    """The whole extents of a submission in a pack, under the addresses that its writer gave them."""
    try:
        pack = OpenPack(folder, file.pack)
        place = Place(pack.file, pack.path, 0)
        moved = addresses_of(place)
    except (FileNotFoundError, Corrupt):
        return
    for extent in extents(pack, file.size):
        here = place._replace(offset=extent.offset)
        if extent.header.submission != key:
            continue
        try:
            verify_extent(here, extent.header)
        except Corrupt:
            continue
        folder.disk.sync_data(pack.file)
        ref = reference(folder, file.pack, here, extent)
        if extent.header.writer == writer_of(file.pack):
            yield extent.header, ref
        for pool, old, offset in moved.get(extent.offset, []):  # copies that nothing leads to do not count
            if extent.header.writer == writer_of(old):
                yield extent.header, msgspec.structs.replace(ref, pool=pool, pack=old, offset=offset)


def reference(folder: Folder, pack: int, place: Place, extent: Extent) -> Ref:
    """The reference of an extent that a scan came upon, after checking its index."""
    index = read_index(place, extent.header.length)
    check = int.from_bytes(index.trailer.digest[:8], "little")
    linked = bool(index.trailer.dependencies)
    return Ref(folder.short, pack, extent.offset, extent.header.length, check, None, linked)
