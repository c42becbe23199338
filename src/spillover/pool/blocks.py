"""Checked reads from an open pack file: an index, or any part of a payload."""

from __future__ import annotations

import os
from typing import NamedTuple

import xxhash

from spillover.errors import Corrupt
from spillover.pool.extent import Index
from spillover.pool.layout import CHUNK, DIGEST, HEADER, Entry, Seal, Trailer
from spillover.store.disk import refusal

__all__ = ["Place", "read_index", "read_payload", "read_seal"]

TAIL = 4096
"""What the first read of an extent's end fetches: the whole index of most extents."""
PIECE = 1 << 20
"""A payload is read in pieces of this size, each checked while it is in the processor's cache."""
_xxh3 = xxhash.xxh3_128_digest


class Place(NamedTuple):
    """An extent in an open pack.

    Attributes:
        file: descriptor of the pack.
        path: the pack's name in errors.
        offset: where the extent begins.
    """

    file: int
    path: str
    offset: int

    def __str__(self) -> str:
        return f"the extent at {self.offset} of {self.path}"


def read_index(place: Place, length: int) -> Index:
    """The index of an extent of ``length`` bytes, found from its trailer.

    Raises:
        Corrupt: trailer or index is damaged, or the file ends before.
    """
    size = min(length, TAIL)
    tail = _read(place, size, place.offset + length - size)
    if len(tail) < size or size < 2 * HEADER:
        raise Corrupt(f"{place} is cut off: the pack ends before it")
    trailer = Trailer.decode(tail[-HEADER:], str(place))
    span = length - HEADER - trailer.index_at
    if trailer.length != length or not 0 <= span <= length - 2 * HEADER:
        raise Corrupt(f"{place} is not what its reference was made for")
    if span <= size - HEADER:
        return Index(tail[size - HEADER - span : size - HEADER], trailer, str(place))
    return Index(_read(place, span, place.offset + trailer.index_at), trailer, str(place))


def read_payload(place: Place, index: Index, entry: Entry, start: int, into: memoryview) -> None:
    """Fill ``into`` with payload bytes of a record from ``start`` on.

    Whole chunks go straight to their place. Of the chunks at the edges only a part may be wanted; these go
    through a buffer of their own, since a checksum needs all of them.

    Raises:
        Corrupt: a chunk is damaged; the message names pack, record and chunk.
    """
    stop = start + len(into)
    while start < stop:
        first, inside = divmod(start, CHUNK)
        whole = (stop - start) // CHUNK * CHUNK if stop < entry.length else stop - start
        if whole and not inside:
            size = min(whole, PIECE)
            _fill(place, index, entry, first, into[:size])
        else:
            edge = bytearray(min(CHUNK, entry.length - first * CHUNK))
            _fill(place, index, entry, first, memoryview(edge))
            size = min(len(edge) - inside, stop - start)
            into[:size] = edge[inside : inside + size]
        start += size
        into = into[size:]


def read_seal(file: int, path: str) -> Seal | None:
    """The seal at the end of a pack; None if it has none.

    Raises:
        Corrupt: there is one, and it is damaged.
    """
    size = os.fstat(file).st_size
    data = os.pread(file, HEADER, size - HEADER) if size >= 2 * HEADER else b""
    try:
        seal = Seal.decode(b"SEAL" + data[4:], path)
    except Corrupt:
        if data[:4] != b"SEAL":
            return None
        raise
    if data[:4] != b"SEAL":
        raise Corrupt(f"the seal of {path} is damaged")
    return seal if seal.end == size - HEADER else None


def _fill(place: Place, index: Index, entry: Entry, first: int, piece: memoryview) -> None:
    """Fill ``piece`` from chunk number ``first`` on, and compare every chunk."""
    at = place.offset + entry.start + first * CHUNK
    try:
        count = os.preadv(place.file, [piece], at)
    except OSError as error:
        raise refusal(error, place.path) from error
    wanted = index.digests(entry, first, -(-len(piece) // CHUNK))
    if len(piece) <= CHUNK and _xxh3(piece) == wanted:
        return
    for number, start in enumerate(range(0, len(piece), CHUNK)):
        chunk = piece[start : start + CHUNK]
        if _xxh3(chunk) != wanted[number * DIGEST : (number + 1) * DIGEST]:
            short = "" if count == len(piece) else ", where the pack ends early"
            raise Corrupt(
                f"{place.path}: record {index.id(entry)!r} of the extent at {place.offset} is damaged in "
                f"chunk {first + number}, bytes {at + start} to {at + start + len(chunk)}{short}"
            )


def _read(place: Place, size: int, offset: int) -> bytes:
    try:
        return os.pread(place.file, size, offset)
    except OSError as error:
        raise refusal(error, place.path) from error
