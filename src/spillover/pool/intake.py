"""Copying extents byte for byte into new packs, which then answer for the old addresses.

Compaction and import share it. Every extent is checked whole on its way, and every new pack once more from
the disk after it was sealed, before anybody relies on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from spillover.errors import Corrupt, StoreError
from spillover.pool.blocks import Place
from spillover.pool.extent import Copy, Draft, Publication, Record
from spillover.pool.folder import Folder
from spillover.pool.layout import RELOCATIONS
from spillover.pool.quota import Quota
from spillover.pool.reader import OpenPack
from spillover.pool.relocation import Row, encode_table
from spillover.pool.scan import Extent, survey, verify_extent
from spillover.pool.writer import Writer

__all__ = ["Intake", "Taken", "copied", "relocation_draft"]

BATCH = 8 << 20


class Taken(NamedTuple):
    """A new pack.

    Attributes:
        pack: its id.
        stop: where its extents end.
        rows: which old addresses it answers for, and where.
    """

    pack: int
    stop: int
    rows: list[Row]


class Intake:
    """Fills new packs with copies. A context manager: leaving it ends its writer.

    Args:
        folder: the pool.
        pack_bytes: a new pack that has grown to this is sealed.
        quota: the room for them.
    """

    def __init__(self, folder: Folder, pack_bytes: int, quota: Quota) -> None:
        self._folder = folder
        self._limit = pack_bytes
        self._writer = Writer(folder, pack_bytes=1 << 62, quota=quota)
        self._waiting: list[tuple[Copy, list[tuple[int, int, int]]]] = []
        self._waiting_bytes = 0
        self._rows: list[Row] = []
        self._filled = 0
        self._pack = 0
        self.taken: list[Taken] = []
        self.copied = 0

    def add(self, copy: Copy, addresses: Sequence[tuple[int, int, int]]) -> None:
        """Take an extent in, to be found under old pool, pack and offset."""
        self._waiting.append((copy, [*addresses]))
        self._waiting_bytes += copy.length
        if self._waiting_bytes >= BATCH:
            self._flush()
        if self._filled >= self._limit:
            self.finish()

    def finish(self) -> list[Taken]:
        """Make everything durable and check it; returns all packs so far."""
        self._flush()
        if self._rows:
            (table,) = self._writer.write([relocation_draft(self._rows, self._writer.id)])
            self._writer.seal()
            self.taken.append(self._checked(table.pack, table.offset + table.length))
            self._rows, self._filled = [], 0
        return self.taken

    def _flush(self) -> None:
        refs = self._writer.write([copy for copy, _ in self._waiting])
        for ref, (copy, addresses) in zip(refs, self._waiting, strict=True):
            self._rows += [(*address, ref.offset) for address in addresses]
            self._filled += copy.length
            self.copied += copy.length
        self._waiting, self._waiting_bytes = [], 0

    def _checked(self, pack: int, stop: int) -> Taken:
        damage: list[Corrupt] = []
        found = survey(OpenPack(self._folder, pack), damage.append)
        if damage or not found.sealed or found.end != stop:
            raise StoreError(
                f"{self._folder.path_of(pack)} does not read back as it was written: {damage[:1]}"
            )
        return Taken(pack, stop, sorted(self._rows))

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


def copied(place: Place, extent: Extent) -> Copy:
    """An extent of an open pack, every byte of it checked.

    Raises:
        Corrupt: it is damaged.
    """
    index = verify_extent(place, extent.header)
    stop = extent.stop
    parts: list[bytes | memoryview] = [
        os.pread(place.file, min(BATCH, stop - start), start) for start in range(extent.offset, stop, BATCH)
    ]
    if sum(map(len, parts)) != extent.header.length:
        raise Corrupt(f"{place} is cut off: the pack ends before it")
    check = int.from_bytes(index.trailer.digest[:8], "little")
    return Copy(parts, extent.header.length, check, bool(index.trailer.dependencies))


def relocation_draft(rows: Sequence[Row], writer: int, metadata: dict[str, Any] | None = None) -> Draft:
    """The extent that closes a pack of copies."""
    record = Record("relocations", encode_table(rows), metadata)
    return Draft(Publication([record]), writer, flags=RELOCATIONS)
