"""One publication as one extent: records in, buffers out; and the index read back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from spillover.errors import Corrupt, InputError
from spillover.pool import codecs
from spillover.pool.layout import (
    ALIGN,
    CHUNK,
    DIGEST,
    ENTRY,
    HEADER,
    REFERENCE,
    RELOCATIONS,
    Entry,
    Trailer,
    extent_header,
    extent_trailer,
)
from spillover.pool.reference import Ref

__all__ = ["Copy", "Draft", "Index", "Link", "Publication", "Record", "Submission", "digests"]

LIMIT = (1 << 32) - 1
"""Most records, dependencies or heap bytes of one extent."""
_xxh3 = xxhash.xxh3_128_digest
_ZEROS = bytes(ALIGN)


class Record(NamedTuple):
    """A named value to publish, or one that was read.

    Attributes:
        id: its name, unique within its publication.
        payload: to publish: bytes, a JSON value, or a NumPy or PyTorch tensor. Read back: bytes, the JSON
            value, or a `Tensor`, which is loaded on request.
        metadata: a JSON object, or None.
    """

    id: str
    payload: Any
    metadata: dict[str, Any] | None = None


class Link(NamedTuple):
    """A record that shares the payload of one published before.

    Attributes:
        id: its name in this publication.
        ref: the record that it stands for.
    """

    id: str
    ref: Ref


class Publication(NamedTuple):
    """What becomes readable as one whole.

    Attributes:
        records: records and links, in order.
        dependencies: publications that stay alive as long as this one does. A number is the index of an
            earlier publication in the same call.
    """

    records: Sequence[Record | Link]
    dependencies: Sequence[Ref | int] = ()


class Submission(NamedTuple):
    """Which request an extent answers; see `ExtentHeader`."""

    key: bytes
    part: int
    parts: int


NO_SUBMISSION = Submission(bytes(16), 0, 1)


class Draft:
    """An extent that is complete but for references to others of the same call.

    Attributes:
        parts: its buffers, in order.
        length: their bytes.
        check: first eight bytes of the index checksum.
        linked: whether it has dependencies.
        index: the index before `resolve`: equal for equal content.
        needs: its dependencies; a number is an earlier publication of the same call.
        relocates: whether it is a relocation table.
    """

    __slots__ = ("_local", "_tail", "check", "index", "length", "linked", "needs", "parts", "relocates")

    def __init__(
        self, publication: Publication, writer: int, submission: Submission = NO_SUBMISSION, flags: int = 0
    ) -> None:
        dependencies = [*publication.dependencies]
        entries, payloads, chunks, heap, end = _records(publication.records, dependencies)
        table, self._local = _dependencies(dependencies) if dependencies else ([], [])
        self.needs: Sequence[Ref | int] = dependencies
        count = len(entries)
        if max(count, len(table), len(heap)) > LIMIT:
            raise InputError(
                "a publication is limited to 4 GiB of ids and metadata", hint="publish it in parts"
            )
        span = ENTRY.size * count + REFERENCE * len(table) + DIGEST * len(chunks) + len(heap)
        self.index = b"".join([*entries, *table, *chunks, heap, _ZEROS[: -span % ALIGN]])
        self.length = end + len(self.index) + HEADER
        self.linked = bool(table)
        self._tail = (flags, self.length, end, count, len(table), len(chunks))
        head = extent_header(flags, self.length, end, *submission, writer)
        self.parts: list[bytes | memoryview] = [head, *payloads]
        self.check = 0
        self.relocates = bool(flags & RELOCATIONS)
        if not self._local:
            self._close(self.index)

    def resolve(self, earlier: Sequence[Ref]) -> None:
        """Fill in the dependencies on earlier publications of the same call."""
        if self._local:
            index = bytearray(self.index)
            for place, number in self._local:
                start = self._tail[3] * ENTRY.size + place * REFERENCE
                index[start : start + REFERENCE] = earlier[number].pack_bytes()
            self._close(bytes(index))

    def _close(self, index: bytes) -> None:
        digest = _xxh3(index)
        self.check = int.from_bytes(digest[:8], "little")
        self.parts += (index, extent_trailer(*self._tail, digest))


class Copy(NamedTuple):
    """An extent of another pack, to be written again byte for byte; the attributes of `Draft`."""

    parts: list[bytes | memoryview]
    length: int
    check: int
    linked: bool
    needs: Sequence[Ref | int] = ()
    relocates: bool = False

    def resolve(self, earlier: Sequence[Ref]) -> None:
        """It refers to nothing that is only now being written."""


def digests(view: bytes | memoryview) -> list[bytes]:
    """The 128-bit checksum of every chunk of ``view``."""
    view = memoryview(view)
    return [_xxh3(view[start : start + CHUNK]) for start in range(0, len(view), CHUNK)]


def _records(
    records: Sequence[Record | Link], dependencies: list[Ref | int]
) -> tuple[list[bytes], list[bytes | memoryview], list[bytes], bytes, int]:
    """Index entries, padded payloads, chunk checksums, the heap, and where the payloads end.

    Appends to ``dependencies`` what the links need.
    """
    entries: list[bytes] = []
    payloads: list[bytes | memoryview] = []
    chunks: list[bytes] = []
    heap: list[bytes] = []
    seen: set[bytes] = set()
    numbers: dict[Ref, int] | None = None
    no_shape: tuple[int, ...] = ()
    end, top = HEADER, 0
    for record in records:
        try:
            label = record.id.encode()
        except (AttributeError, UnicodeEncodeError):
            raise _no_label(record.id) from None
        if label in seen:
            raise InputError(f"two records of one publication have the id {record.id!r}")
        seen.add(label)
        if isinstance(record, Link):
            if numbers is None:
                numbers = _numbered(dependencies)
            link = _linked(record, dependencies, numbers)
            entries.append(ENTRY.pack(0, 0, 0, top, len(label), 0, 0, 0, 0, 1, *link))
            heap.append(label)
            top += len(label)
            continue
        data = record.payload
        codec, dtype, shape = codecs.BYTES, 0, no_shape
        if type(data) is not bytes:
            codec, dtype, shape, data = _encoded(record)
        note = codecs.encode_json(record.metadata) if record.metadata else b""
        size = len(data)
        entries.append(
            ENTRY.pack(end, size, len(chunks), top, len(label), len(note), codec, dtype, len(shape), 0, 0, 0)
        )
        heap += (label, note)
        if shape:
            heap.append(struct.pack(f"<{len(shape)}q", *shape))
        top += len(label) + len(note) + 8 * len(shape)
        if 0 < size <= CHUNK:
            chunks.append(_xxh3(data))
        else:
            chunks += digests(data)
        payloads.append(data)
        gap = -size % ALIGN
        if gap:
            payloads.append(_ZEROS[:gap])
        end += size + gap
    return entries, payloads, chunks, b"".join(heap), end


def _encoded(record: Record) -> codecs.Encoded:
    if isinstance(record.payload, (Record, Link, Publication)):  # tuples, which JSON would take for lists
        raise InputError(f"record {record.id!r}: a {type(record.payload).__name__} is no payload")
    try:
        return codecs.encode(record.payload)
    except InputError as error:
        raise InputError(f"record {record.id!r}: {error}", hint=error.hint) from None


def _no_label(name: object) -> InputError:
    return InputError(f"{name!r} cannot be a record's id: it is no text that UTF-8 can hold")


def _numbered(dependencies: Sequence[Ref | int]) -> dict[Ref, int]:
    """The places of those that were published before."""
    return {ref.whole(): place for place, ref in enumerate(dependencies) if isinstance(ref, Ref)}


def _linked(link: Link, dependencies: list[Ref | int], numbers: dict[Ref, int]) -> tuple[int, int]:
    """Number of the dependency and of its record that ``link`` stands for."""
    if link.ref.ordinal is None:
        raise InputError(
            f"the link {link.id!r} points at a whole publication", hint="ref.at(n) is one record"
        )
    whole = link.ref.whole()
    number = numbers.setdefault(whole, len(dependencies))
    if number == len(dependencies):
        dependencies.append(whole)
    return number, link.ref.ordinal


def _dependencies(dependencies: Sequence[Ref | int]) -> tuple[list[bytes], list[tuple[int, int]]]:
    """The table of references, and the places in it that wait for publications of the same call."""
    table, local = [], []
    for place, dependency in enumerate(dependencies):
        if isinstance(dependency, int):
            local.append((place, dependency))
            table.append(dependency.to_bytes(REFERENCE, "little"))  # until `Draft.resolve` knows better
        else:
            table.append(dependency.whole().pack_bytes())
    return table, local


class Index:
    """The index of an extent, checked and ready to be asked.

    Args:
        data: the index, from its first entry up to the trailer.
        trailer: the extent's trailer.
        where: names the extent in errors.
    """

    def __init__(self, data: bytes, trailer: Trailer, where: str) -> None:
        self.trailer = trailer
        self.records = trailer.records
        self._data = data
        self._links = trailer.records * ENTRY.size
        self._chunks = self._links + trailer.dependencies * REFERENCE
        self._heap = self._chunks + trailer.chunks * DIGEST
        if _xxh3(data) != trailer.digest or self._heap > len(data):
            raise Corrupt(f"the index of {where} is damaged")

    @property
    def nbytes(self) -> int:
        """Size of the index in bytes."""
        return len(self._data)

    def entry(self, ordinal: int) -> Entry:
        """The entry of one record; `IndexError` if there is none."""
        if not 0 <= ordinal < self.records:
            raise IndexError(ordinal)
        return Entry._make(ENTRY.unpack_from(self._data, ordinal * ENTRY.size))

    def entries(self) -> Iterator[Entry]:
        """All entries, in order."""
        return map(Entry._make, ENTRY.iter_unpack(memoryview(self._data)[: self._links]))

    def id(self, entry: Entry) -> str:
        """A record's id."""
        start = self._heap + entry.heap
        return self._data[start : start + entry.id_length].decode()

    def metadata(self, entry: Entry) -> dict[str, Any] | None:
        """A record's metadata."""
        start = self._heap + entry.heap + entry.id_length
        found = self._data[start : start + entry.metadata_length]
        return codecs.decode_json(found) if found else None

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """A tensor's shape."""
        start = self._heap + entry.heap + entry.id_length + entry.metadata_length
        return struct.unpack_from(f"<{entry.rank}q", self._data, start)

    def digests(self, entry: Entry, first: int, count: int) -> bytes:
        """The checksums of ``count`` chunks of a record from chunk ``first`` on, 16 bytes each."""
        start = self._chunks + (entry.chunk + first) * DIGEST
        return self._data[start : start + count * DIGEST]

    def dependency(self, number: int) -> Ref:
        """One of the publications that this one needs."""
        start = self._links + number * REFERENCE
        return Ref.from_bytes(self._data[start : start + REFERENCE])

    def dependencies(self) -> list[Ref]:
        """The publications that this one needs."""
        return [self.dependency(number) for number in range(self.trailer.dependencies)]
