"""The bytes of a pack, number by number. ``docs/formats.md`` draws the same.

A pack is a header and then extents, back to back; a sealed one ends with a seal. An extent is one
publication: a header, the payloads (each from a multiple of 64), the index, a trailer. All integers are
little-endian. Nothing in an extent depends on where it lies, so it can be copied as it is.

Checksums are XXH3 (github.com/Cyan4973/xxHash, specification of XXH3): 64 bits over every header,
trailer and seal, 128 bits over the index and over every chunk of every payload. They find damage, not
malice.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from spillover.errors import Corrupt

__all__ = [
    "ALIGN",
    "CHUNK",
    "ENTRY",
    "HEADER",
    "VERSION",
    "Entry",
    "ExtentHeader",
    "PackHeader",
    "Seal",
    "Trailer",
    "padding",
]

VERSION = 1
XXH3 = 1
ALIGN = 64
CHUNK = 1 << 16
"""Bytes under one checksum. Small, because a read of one row has to check all of a chunk."""
HEADER = 64
"""Size in bytes of the pack header, the extent header, the trailer and the seal alike."""
REFERENCE = 48
DIGEST = 16
RELOCATIONS = 1
"""Extent flag: the payload is a table of relocated extents."""

_PACK = struct.Struct("<8sHHB3x16sQQQ")
_EXTENT = struct.Struct("<4sIQQ16sIIQ")
_TRAILER = struct.Struct("<4sIQQIIQ16s")
_SEAL = struct.Struct("<4sIQQQ24x")
_CHECK = struct.Struct("<Q")
_ENDS = struct.Struct("<8xQ24xQ8xQ")
ENTRY = struct.Struct("<QQQIIIBBBBII")
"""One record of an index, 48 bytes; the fields of `Entry`."""

_xxh3 = xxhash.xxh3_64_intdigest


class Entry(NamedTuple):
    """A record in an index.

    Attributes:
        start: where its payload begins, from the extent's first byte.
        length: of the payload, in bytes.
        chunk: number of its first chunk checksum in the index.
        heap: where its id begins in the heap; its metadata and its shape (8 bytes a dimension) follow.
        id_length: bytes of the id, in UTF-8.
        metadata_length: bytes of the metadata, JSON; 0 for none.
        codec: see `spillover.pool.codecs`.
        dtype: number of the tensor's dtype; 0 for what is no tensor.
        rank: number of dimensions.
        kind: 0 for a payload of its own; 1 for a link to a record of a dependency.
        dependency: of a link: which dependency.
        ordinal: of a link: which record of it.
    """

    start: int
    length: int
    chunk: int
    heap: int
    id_length: int
    metadata_length: int
    codec: int
    dtype: int
    rank: int
    kind: int
    dependency: int
    ordinal: int


class PackHeader(NamedTuple):
    """First 64 bytes of a pack."""

    pool: bytes
    pack: int
    writer: int

    def encode(self) -> bytes:
        log2 = CHUNK.bit_length() - 1
        return checked(_PACK.pack(b"SPILPACK", VERSION, XXH3, log2, self.pool, self.pack, self.writer, 0))

    @classmethod
    def decode(cls, data: bytes, where: str) -> PackHeader:
        """Read a header back.

        Raises:
            Corrupt: damaged, or of another format version.
        """
        if len(data) != HEADER or data[:8] != b"SPILPACK":
            raise Corrupt(f"{where} is not a pack")
        (version,) = struct.unpack_from("<H", data, 8)
        if version != VERSION:
            raise Corrupt(
                f"{where} has format version {version}, this spillover reads version {VERSION}",
                hint="pip install --upgrade spillover",
            )
        require_check(data, f"the header of {where}")
        _, _, algorithm, log2, pool, pack, writer, _ = _PACK.unpack_from(data)
        if algorithm != XXH3 or 1 << log2 != CHUNK:
            raise Corrupt(f"{where} uses checksums of an unknown kind ({algorithm}, 2^{log2} bytes)")
        return cls(pool, pack, writer)


class ExtentHeader(NamedTuple):
    """First 64 bytes of an extent; what a scan needs to go from one to the next.

    Attributes:
        flags: `RELOCATIONS` or 0.
        length: of the extent, in bytes.
        index_at: where its index begins.
        submission: checksum of the submission id; zeros for none.
        part: which publication of the submission this is, from 0.
        parts: how many the submission has.
        writer: who wrote it first.
    """

    flags: int
    length: int
    index_at: int
    submission: bytes
    part: int
    parts: int
    writer: int

    @classmethod
    def decode(cls, data: bytes, where: str) -> ExtentHeader:
        if len(data) != HEADER or data[:4] != b"EXT1":
            raise Corrupt(f"{where} is not the beginning of an extent")
        require_check(data, f"the header of {where}")
        return cls(*_EXTENT.unpack_from(data)[1:])


class Trailer(NamedTuple):
    """Last 64 bytes of an extent, from which its index is found and checked.

    Attributes:
        flags: as in the header.
        length: as in the header.
        index_at: as in the header.
        records: number of entries.
        dependencies: number of references after the entries.
        chunks: number of checksums after the references.
        digest: 128-bit checksum of the index.
    """

    flags: int
    length: int
    index_at: int
    records: int
    dependencies: int
    chunks: int
    digest: bytes

    @classmethod
    def decode(cls, data: bytes | memoryview, where: str) -> Trailer:
        if len(data) != HEADER or data[:4] != b"END1":
            raise Corrupt(f"{where} has no trailer where it should end")
        require_check(data, f"the trailer of {where}")
        return cls(*_TRAILER.unpack_from(data)[1:])


def extent_header(
    flags: int, length: int, index_at: int, submission: bytes, part: int, parts: int, writer: int
) -> bytes:
    """The bytes of an `ExtentHeader`."""
    head = _EXTENT.pack(b"EXT1", flags, length, index_at, submission, part, parts, writer)
    return head + _CHECK.pack(_xxh3(head))


def extent_trailer(
    flags: int, length: int, index_at: int, records: int, dependencies: int, chunks: int, digest: bytes
) -> bytes:
    """The bytes of a `Trailer`."""
    head = _TRAILER.pack(b"END1", flags, length, index_at, records, dependencies, chunks, digest)
    return head + _CHECK.pack(_xxh3(head))


def ends(trailer: bytes, length: int, check: int) -> bool:
    """Whether this is the trailer of an extent of that length and index checksum."""
    if len(trailer) != HEADER or trailer[:4] != b"END1":
        return False
    found, start, own = _ENDS.unpack(trailer)
    return bool(found == length and start == check and own == _xxh3(trailer[: HEADER - 8]))


class Seal(NamedTuple):
    """Last 64 bytes of a sealed pack.

    Attributes:
        end: where the seal lies, and so where the last extent ends.
        extents: how many there are.
        relocations: offset of the extent that holds the relocation table; 0 for none.
    """

    end: int
    extents: int
    relocations: int

    def encode(self) -> bytes:
        return checked(_SEAL.pack(b"SEAL", 0, *self))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Seal:
        if len(data) != HEADER or data[:4] != b"SEAL":
            raise Corrupt(f"{where} is not a seal")
        require_check(data, f"the seal of {where}")
        return cls(*_SEAL.unpack_from(data)[2:])


def checked(head: bytes) -> bytes:
    """Append the 64-bit checksum of 56 bytes."""
    return head + _CHECK.pack(_xxh3(head))


def require_check(data: bytes | memoryview, what: str) -> None:
    """Compare the 64-bit checksum at the end of 64 bytes.

    Raises:
        Corrupt: it does not match.
    """
    if _CHECK.unpack_from(data, HEADER - 8)[0] != _xxh3(data[: HEADER - 8]):
        raise Corrupt(f"{what} is damaged")


def padding(length: int) -> int:
    """Bytes from ``length`` to the next multiple of `ALIGN`."""
    return -length % ALIGN
