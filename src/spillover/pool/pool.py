"""A pool: records and tensors that many processes write and read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spillover.errors import InputError
from spillover.pool.extent import Link, Publication, Record
from spillover.pool.folder import Folder
from spillover.pool.owners import Owners
from spillover.pool.reader import Indexes, OpenPack, Pin, Reader, RecordSet
from spillover.pool.reference import Ref
from spillover.pool.relocation import Relocations
from spillover.pool.scan import receipt
from spillover.pool.tensors import Tensor, patched
from spillover.pool.verify import Verification, verify
from spillover.pool.writer import PACK_BYTES, Writer
from spillover.store.disk import Disk

__all__ = ["Pool"]


class Pool:
    """A pool as one process uses it; any number of threads may share it.

    Publishing registers a writer the first time; a forked child gets its own. What is published belongs to
    this process until it is settled: `Owners.retain` in the same process does that, `settle` says that some
    other process owns it. Closing the pool settles everything. Collection, which runs only when somebody
    asks, deletes what belongs to nobody.
    """

    def __init__(self, folder: Folder, pack_bytes: int = PACK_BYTES) -> None:
        self.folder = folder
        self._pack_bytes = pack_bytes
        self._indexes = Indexes()
        self._relocations = Relocations(folder)
        self._opened: weakref.WeakValueDictionary[int, OpenPack] = weakref.WeakValueDictionary()
        self._writer: Writer | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        create: bool = False,
        max_bytes: int | None = None,
        pack_bytes: int = PACK_BYTES,
        disk: Disk | None = None,
    ) -> Pool:
        """Open the pool in a folder.

        Args:
            path: a folder on this machine, or on a mount that many machines share.
            create: make the pool if there is none.
            max_bytes: of a pool that is made: most bytes that its packs may take.
            pack_bytes: size at which a pack is sealed.
            disk: stands in for the system calls of writing; for tests.

        Raises:
            InputError: there is no pool, or ``path`` is an address that no folder has.
            Mismatch: the pool has another format.
            StoreRefused: the filesystem is not known to keep locks and syncs.
        """
        if "://" in str(path):
            raise InputError(f"{path}: a pool lies in a folder", hint="use a path on a local or shared mount")
        place = Path(path).expanduser()
        folder = Folder.create(place, max_bytes=max_bytes, disk=disk) if create else Folder(place, disk)
        return cls(folder, pack_bytes)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    @property
    def id(self) -> str:
        """The pool's id, 32 hexadecimal digits."""
        return self.folder.identity.id

    @property
    def writer(self) -> Writer:
        """This process's writer, registered when it is first asked for."""
        with self._lock:
            if self._writer is None or self._process != os.getpid():
                self._process = os.getpid()
                self._writer = Writer(self.folder, pack_bytes=self._pack_bytes)
            return self._writer

    def publish(
        self,
        records: Sequence[Record | Link],
        *,
        dependencies: Sequence[Ref] = (),
        submission: str | None = None,
    ) -> Ref:
        """Publish records as one whole, durable on return; see `Writer.publish`."""
        return self.writer.publish(records, dependencies=dependencies, submission=submission)

    def publish_many(
        self, publications: Sequence[Publication], *, submission: str | None = None
    ) -> list[Ref]:
        """Publish several wholes that become durable together; see `Writer.publish_many`."""
        return self.writer.publish_many(publications, submission=submission)

    def publish_tensors(
        self, tensors: Mapping[str, Any], *, dependencies: Sequence[Ref] = (), submission: str | None = None
    ) -> dict[str, Ref]:
        """Publish named tensors as one whole; returns the reference of each."""
        return self.writer.publish_tensors(tensors, dependencies=dependencies, submission=submission)

    def updated(self, ref: Ref, values: Mapping[str, Any]) -> Ref:
        """Publish a publication again with some records replaced or added; the others are shared, not copied.

        The old publication stays as it is.
        """
        return self.publish(replaced(self.read(ref), values))

    def updated_rows(self, ref: Ref, name: str, start: int, rows: Any) -> Ref:
        """Publish a publication again with rows of one tensor replaced; everything else is shared.

        Args:
            start: first row to replace.
            rows: an array or tensor of the tensor's dtype and row shape.

        Raises:
            InputError: ``name`` is no tensor, or the rows do not fit it.
        """
        return self.updated(ref, {name: patched(self.tensor(self.read(ref).ref_of(name)), start, rows)})

    def receipt(self, submission: str) -> list[Ref] | None:
        """The references that a submission got whose answer was lost, whoever wrote it; None if none did.

        Looks at every extent of the pool; a writer answers for its own submissions at once.
        """
        return receipt(self.folder, submission)

    def read(self, ref: Ref) -> RecordSet:
        """The records of a publication; see `Reader.read`. Its pack stays on disk while this object lives.

        The packs of what it links to do not: `pin` keeps these as well.
        """
        return self.reader().read(ref)

    def record(self, ref: Ref) -> Record:
        """One record; see `Reader.record`."""
        return self.reader().record(ref)

    def tensor(self, ref: Ref) -> Tensor:
        """A tensor to read from; see `Reader.tensor`."""
        return self.reader().tensor(ref)

    def reader(self) -> Reader:
        """A new read session."""
        return Reader(self.folder, self._indexes, self._relocations, self._opened)

    def pin(self, refs: Sequence[Ref]) -> Pin:
        """Keep publications on disk until the pin is closed or this process ends; see `Reader.pin`."""
        return self.reader().pin(refs)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Verification:
        """Check every byte of every pack; see `spillover.pool.verify`."""
        return verify(self.folder, progress)

    def owners(self, *, takeover: bool = False) -> Owners:
        """Open the ownership catalogue, which one process has at a time; see `Owners`.

        Raises:
            LockContended: another live process has it.
        """
        return Owners(self.folder, takeover=takeover, pack_bytes=self._pack_bytes)

    def settle(self, refs: Iterable[Ref]) -> None:
        """Let go of publications that another process owns by now; see `Writer.settle`."""
        self.writer.settle(refs)

    def seal(self) -> None:
        """End the open pack, so that it can be collected or compacted."""
        self.writer.seal()

    def close(self) -> None:
        """End this process's writer. What nobody owns by now can be collected.

        Publishing again registers a new one.
        """
        with self._lock:
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def replaced(old: RecordSet, values: Mapping[str, Any]) -> list[Record | Link]:
    """The records of ``old`` as links, but those named in ``values`` anew."""
    records: list[Record | Link] = [
        Record(name, values[name], old.metadata_of(name)) if name in values else Link(name, old.ref_of(name))
        for name in old
    ]
    return records + [Record(name, value) for name, value in values.items() if name not in old]
