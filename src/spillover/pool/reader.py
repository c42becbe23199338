"""Reading: every byte is checked before it is handed out, and nothing else is read than what was asked for.

A session keeps the packs that it touched last open, each under a shared flock, and remembers the indexes it
parsed; record sets and tensors keep their own pack open for as long as they live.
The collector deletes a pack only while it holds that lock alone, so what a session has open stays, on
every machine that shares the mount, until the session lets go or its process dies. No lease is involved:
time says nothing about whether a reader stopped.

Payloads go straight from the file into the caller's memory and are checked there.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spillover.errors import Collected, Corrupt, InputError
from spillover.pool import codecs
from spillover.pool.blocks import Place, read_index, read_payload
from spillover.pool.extent import Index, Record
from spillover.pool.folder import Folder
from spillover.pool.layout import HEADER, Entry, PackHeader, ends
from spillover.pool.reference import Ref, pack_name
from spillover.pool.relocation import Relocations
from spillover.pool.tensors import Tensor
from spillover.store.disk import refusal

__all__ = ["Indexes", "OpenPack", "Pin", "Reader", "RecordSet", "Unbegun"]

INDEX_BYTES = 32 << 20
"""Parsed indexes that a session remembers."""
OPEN_PACKS = 64
"""Packs that a session keeps open."""
INDEX_OVERHEAD = 1 << 10
"""What Python needs to remember an index, about, besides its bytes."""
T = TypeVar("T")


_packs: weakref.WeakSet[OpenPack] = weakref.WeakSet()


class Unbegun(Corrupt):
    """Raised for a pack with nothing in it: its first write was cut off or is still to come.

    A write that the power cut off may have left its later pages, and zeros where the first should be.
    """


class OpenPack:
    """A pack that stays on disk as long as this object lives.

    Attributes:
        size: of the file when it was opened, in bytes.

    Raises:
        FileNotFoundError: it is gone.
        Unbegun: there is nothing in it.
        Corrupt: its header is damaged or names another pool.
    """

    def __init__(self, folder: Folder, pack: int) -> None:
        self.id = pack
        self.path = folder.name_of(pack)
        self._descriptor = _Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        self.file = self._descriptor.number
        _packs.add(self)
        fcntl.flock(self.file, fcntl.LOCK_SH)
        state = os.fstat(self.file)
        if state.st_nlink == 0:  # deleted between open and flock
            raise FileNotFoundError(self.path)
        self.size = state.st_size
        head = os.pread(self.file, HEADER + 1, 0)  # read once: a writer may begin the pack a moment later
        if len(head) <= HEADER or not any(head[:HEADER]):
            raise Unbegun(f"{self.path} is not a pack, or not yet: nothing is in it")
        header = PackHeader.decode(head[:HEADER], self.path)
        if header.pool != folder.id or header.pack != pack:
            raise Corrupt(f"{self.path} is a pack of another pool or name")

    def forget(self) -> None:
        """Let the pack go."""
        self.file = -1
        self._descriptor.close()


class _Descriptor:
    """Closes a file when nobody refers to it any more.

    An object of its own, which nobody refers to weakly: a weak reference to an object with a finalizer can
    bring it back while the finalizer runs, with a file that is closed a moment later.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Stored:
    """A record's payload where it is stored. Holds its pack on disk."""

    reader: Reader
    pack: OpenPack
    ref: Ref
    index: Index
    entry: Entry

    def read(self, start: int, into: memoryview) -> None:
        """Read payload bytes from ``start`` on; only the chunks that they touch are read and checked."""
        self.reader.fill(self.ref, self.index, self.entry, start, into)


class RecordSet(Mapping[str, Record]):
    """The records of one publication by id, in order. Payloads are read when a record is asked for."""

    def __init__(self, reader: Reader, ref: Ref, index: Index, pack: OpenPack) -> None:
        self.ref = ref
        self._reader = reader
        self._index = index
        self._pack = pack
        self._places = {index.id(entry): place for place, entry in enumerate(index.entries())}

    def __getitem__(self, name: str) -> Record:
        return self._reader.record(self.ref.at(self._places[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def metadata_of(self, name: str) -> dict[str, Any] | None:
        """A record's metadata, without its payload."""
        return self._index.metadata(self._index.entry(self._places[name]))

    def ref_of(self, name: str) -> Ref:
        """The reference of one record."""
        return self.ref.at(self._places[name])

    @property
    def dependencies(self) -> list[Ref]:
        """The publications that this one keeps alive."""
        return self._index.dependencies()


class Indexes:
    """The indexes that were read last, up to `INDEX_BYTES`. They never change and hold nothing on disk."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[int, int, int], Index] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, ref: Ref) -> Index | None:
        """The index of an extent, if it is remembered."""
        key = (ref.pool, ref.pack, ref.offset)
        with self._lock:
            if (index := self._found.get(key)) is not None:
                self._found.move_to_end(key)
            return index

    def add(self, ref: Ref, index: Index) -> None:
        """Remember an index and forget the oldest."""
        key = (ref.pool, ref.pack, ref.offset)
        with self._lock:
            if key not in self._found:
                self._bytes += index.nbytes + INDEX_OVERHEAD
            self._found[key] = index
            while self._bytes > INDEX_BYTES and len(self._found) > 1:
                self._bytes -= self._found.popitem(last=False)[1].nbytes + INDEX_OVERHEAD


class Reader:
    """A read session. Threads may share it; a context manager, which lets everything go at its end.

    Args:
        folder: the pool.
        indexes: shared with other sessions of the same pool.
        relocations: likewise.
        opened: packs that other sessions of the same pool have open; each takes one descriptor for all.
    """

    def __init__(
        self,
        folder: Folder,
        indexes: Indexes | None = None,
        relocations: Relocations | None = None,
        opened: weakref.WeakValueDictionary[int, OpenPack] | None = None,
    ) -> None:
        self.folder = folder
        self._indexes = indexes or Indexes()
        self._relocations = relocations or Relocations(folder)
        self._opened = weakref.WeakValueDictionary() if opened is None else opened
        self._packs: OrderedDict[int, OpenPack] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def read(self, ref: Ref) -> RecordSet:
        """The publication that ``ref`` belongs to.

        Raises:
            Collected: it is gone, since nobody owned it.
            Corrupt: its index is damaged; the message names pack and extent.
            Mismatch: it belongs to another pool.
        """
        index = self.index(ref)
        return RecordSet(self, ref.whole(), index, self._locate(ref)[0])

    def record(self, ref: Ref) -> Record:
        """One record, its payload read and checked; a tensor is only described.

        Raises:
            Corrupt: the payload is damaged; the message names pack, record and chunk.
        """
        found, index, entry = self._find(ref)
        name, metadata = self._name(ref), index.metadata(entry)
        if entry.codec == codecs.TENSOR:
            return Record(name, self._tensor(found, index, entry), metadata)
        data = bytearray(entry.length)
        self.fill(found, index, entry, 0, memoryview(data))
        value = codecs.decode_json(data) if entry.codec == codecs.JSON else bytes(data)
        return Record(name, value, metadata)

    def tensor(self, ref: Ref) -> Tensor:
        """A tensor, described; its elements are read on request.

        Raises:
            InputError: the record is no tensor.
        """
        ref, index, entry = self._find(ref)
        if entry.codec != codecs.TENSOR:
            raise InputError(f"record {index.id(entry)!r} is no tensor")
        return self._tensor(ref, index, entry)

    def read_into(self, ref: Ref, buffer: Any) -> int:
        """Read a record's payload into the front of ``buffer``; returns its size in bytes.

        Raises:
            InputError: ``buffer`` is smaller than the payload, or cannot be written.
        """
        ref, index, entry = self._find(ref)
        self.fill(ref, index, entry, 0, codecs.writable(buffer, entry.length))
        return entry.length

    def read_bytes(self, ref: Ref, start: int, into: memoryview) -> None:
        """Read a part of a record's payload; only the chunks that it touches are read and checked.

        Raises:
            InputError: the payload has no such bytes.
        """
        ref, index, entry = self._find(ref)
        if start < 0 or start + len(into) > entry.length:
            raise InputError(f"record {index.id(entry)!r} has no bytes {start} to {start + len(into)}")
        self.fill(ref, index, entry, start, into)

    def index(self, ref: Ref) -> Index:
        """The index of an extent, checked."""
        if (index := self._indexes.get(ref)) is None:
            index = self._reading(ref, lambda place: read_index(place, ref.length))
            self._indexes.add(ref, index)
        if index.trailer.digest[:8] != ref.check.to_bytes(8, "little"):
            raise Corrupt(f"{self._where(ref)} is not what its reference was made for")
        return index

    def pin(self, refs: Sequence[Ref]) -> Pin:
        """Keep publications, and all that they depend on, on disk until the pin is closed.

        Raises:
            Collected: one is gone already.
        """
        packs: dict[int, OpenPack] = {}
        todo, seen = [*refs], set()
        while todo:
            ref = todo.pop()
            if (ref.pool, ref.pack, ref.offset) in seen:
                continue
            seen.add((ref.pool, ref.pack, ref.offset))
            pack, _ = self._locate(ref)
            packs[pack.file] = pack
            if ref.linked:
                todo += self.index(ref).dependencies()
        return Pin([*packs.values()])

    def place(self, ref: Ref, gone: Container[int] = ()) -> tuple[int, int]:
        """The pack that holds an extent now, and the offset in it. The extent itself is not looked at.

        Args:
            gone: packs that count as deleted already.

        Raises:
            Collected: the pack is gone.
        """
        pack, offset = self._locate(ref, gone)
        return pack.id, offset

    def require(self, ref: Ref, gone: Container[int] = ()) -> tuple[int, int]:
        """Like `place`, and the extent's trailer is what the reference was made for.

        Raises:
            Corrupt: it is not: the reference was made up, or the trailer is damaged.
        """
        pack, offset = self._locate(ref, gone)
        trailer = os.pread(pack.file, HEADER, offset + ref.length - HEADER)
        if not ends(trailer, ref.length, ref.check):
            raise Corrupt(f"{self._where(ref)} is not what its reference was made for")
        return pack.id, offset

    def close(self) -> None:
        """Let all packs go."""
        with self._lock:
            self._packs.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _find(self, ref: Ref) -> tuple[Ref, Index, Entry]:
        """The extent, index and entry that hold the record, where links end."""
        if ref.ordinal is None:
            raise InputError("the reference is of a whole publication", hint="ref.at(n) is one record")
        while True:
            index = self.index(ref)
            try:
                entry = index.entry(ref.ordinal or 0)
            except IndexError:
                raise InputError(
                    f"{self._where(ref)} has {index.records} records, no number {ref.ordinal}"
                ) from None
            if entry.kind == 0:
                return ref, index, entry
            ref = index.dependency(entry.dependency).at(entry.ordinal)

    def _name(self, ref: Ref) -> str:
        """What a record is called in its own publication, be it a link or not."""
        index = self.index(ref)
        return index.id(index.entry(ref.ordinal or 0))

    def _tensor(self, ref: Ref, index: Index, entry: Entry) -> Tensor:
        dtype = codecs.dtype_numbered(entry.dtype)
        if dtype is None:
            raise Corrupt(
                f"record {index.id(entry)!r} of {self._where(ref)} has the unknown dtype {entry.dtype}"
            )
        pack, _ = self._locate(ref)
        return Tensor(Stored(self, pack, ref, index, entry), index.id(entry), dtype, index.shape(entry))

    def fill(self, ref: Ref, index: Index, entry: Entry, start: int, into: memoryview) -> None:
        """Read payload bytes of a record that was found before; see `read_payload`."""
        self._reading(ref, lambda place: read_payload(place, index, entry, start, into))

    def _reading(self, ref: Ref, act: Callable[[Place], T]) -> T:
        """Do ``act`` where the extent lies, twice if need be.

        A network mount may show an open file as it was when it was opened, so the second try opens it again.
        """
        pack, offset = self._locate(ref)
        try:
            return act(Place(pack.file, pack.path, offset))
        except Corrupt:
            with self._lock:
                self._packs.pop(pack.id, None)
                self._opened.pop(pack.id, None)
        pack, offset = self._locate(ref)
        return act(Place(pack.file, pack.path, offset))

    def _locate(self, ref: Ref, gone: Container[int] = ()) -> tuple[OpenPack, int]:
        """The open pack that holds an extent now, and where in it."""
        for _ in range(2):  # where the file ``moved`` led to may have been replaced while we looked
            if ref.pool == self.folder.short and ref.pack not in gone:
                pack = self._open(ref.pack)
                if pack is not None:
                    return pack, ref.offset
            for target in self._relocations.targets(ref.pool, ref.pack):
                pack = self._open(target) if target not in gone else None
                if pack is None:
                    continue
                offset = self._relocations.find(Place(pack.file, pack.path, 0), target, ref)
                if offset is not None:
                    return pack, offset
        self.folder.require_own(ref)
        raise Collected(
            f"{self._where(ref)} is gone: nobody owned it when the pool was collected",
            hint="retain a reference before its writer ends",
        )

    def _open(self, pack: int) -> OpenPack | None:
        """The pack, open and locked; None if it does not exist."""
        with self._lock:
            if self._process != os.getpid():  # descriptors of the parent share its locks
                self._packs.clear()
                self._process = os.getpid()
            found = self._packs.get(pack)
            if found is not None:
                self._packs.move_to_end(pack)
                return found
        found = self._opened.get(pack)
        if found is None or found.file < 0:  # or forgotten, in a forked child
            try:
                found = OpenPack(self.folder, pack)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise refusal(error, str(self.folder.path_of(pack))) from error
            self._opened[pack] = found
        with self._lock:
            self._packs[pack] = found
            while len(self._packs) > OPEN_PACKS:
                self._packs.popitem(last=False)
        return found

    def _where(self, ref: Ref) -> str:
        return f"the extent at {ref.offset} of pack {pack_name(ref.pack)}"


class Pin:
    """Packs that stay on disk until `close`, or the end of the process."""

    def __init__(self, packs: list[OpenPack]) -> None:
        self._packs = packs

    def close(self) -> None:
        """Let them go."""
        self._packs = []

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _forget_in_child() -> None:
    """A forked child must not keep packs on disk that its parent read, after the parent died."""
    for pack in [*_packs]:
        pack.forget()


os.register_at_fork(after_in_child=_forget_in_child)
