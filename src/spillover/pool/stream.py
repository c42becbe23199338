"""One open pack of a writer: extents appended in groups, each with one write and one sync.

Guarantee: what `Stream.write` returned a reference for is durable, and the writer was still registered
afterwards. A failed group leaves everything before it as it was.

Steps: lay the extents of the group out behind each other, write them with one call, sync, and look whether
the gate still stands. When a write fails, the pack is cut back to its durable end. When a sync fails, nobody
knows what the disk kept (the kernel may drop the pages and report success the next time), so that pack is
left for good.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spillover.errors import StateError, StoreError, StoreFull
from spillover.pool.ahead import Ahead
from spillover.pool.extent import Copy, Draft
from spillover.pool.folder import Folder
from spillover.pool.gate import Gate
from spillover.pool.group import Group
from spillover.pool.held import Held, Place
from spillover.pool.layout import HEADER, PackHeader, Seal
from spillover.pool.quota import Quota
from spillover.pool.reference import Ref, pack_id
from spillover.store.disk import refusal

__all__ = ["Drafted", "Stream"]

GROUP_BYTES = 64 << 20
JOIN_BYTES = 1 << 20
Drafted = Draft | Copy


class Stream:
    """A sequence of packs, one open at a time. Threads may share it.

    Args:
        folder: the pool.
        gate: the writer's.
        held: keeps what is not settled.
        quota: the pool's limit.
        pack_bytes: size at which a pack is sealed.
    """

    def __init__(
        self,
        folder: Folder,
        gate: Gate,
        held: Held,
        quota: Quota,
        pack_bytes: int,
    ) -> None:
        self._folder = folder
        self._gate = gate
        self._serial = 0
        self._held = held
        self._quota = quota
        self._pack_bytes = pack_bytes
        self._ahead = Ahead(folder, quota, pack_bytes)
        self._pack: _Pack | None = None
        self._closed = False
        self._group: Group[Sequence[Drafted] | None, list[Ref]] = Group(self._commit, _weight, GROUP_BYTES)

    def write(self, drafts: Sequence[Drafted]) -> list[Ref]:
        """Write extents; durable on return."""
        return self._group(drafts)

    def seal(self) -> None:
        """End the open pack.

        Raises:
            StoreError: it has no seal now. Its publications stay, and it ends when the writer does.
        """
        self._group(None)

    def close(self) -> None:
        """End the open pack, with a seal if the disk lets it, and refuse all that comes later."""
        self._closed = True
        self._group(None)

    def forget(self) -> None:
        """Close what a forked child inherited."""
        if self._pack is not None:
            os.close(self._pack.file)
            self._pack = None

    def _commit(self, calls: Sequence[Sequence[Drafted] | None]) -> list[list[Ref] | BaseException]:
        """Make the extents of all ``calls`` durable; None seals. One caller at a time gets here."""
        if self._closed:
            if self._pack is not None:
                self._finish(self._pack)
            refused = StateError("this writer is closed", hint="open the pool again")
            return [[] if call is None else refused for call in calls]
        if self._pack is None and not any(calls):
            return [[] for _ in calls]
        answers: list[list[Ref] | BaseException] = []
        parts: list[bytes | memoryview] = []
        offsets: list[int] = []
        needs: dict[Place, list[Place]] = {}
        pack = self._ready(sum(map(_weight, calls)))
        pool, number, end = self._folder.short, pack.id, pack.end
        for drafts in calls:
            refs: list[Ref] = []
            for draft in drafts or ():
                if draft.needs:
                    draft.resolve(refs)
                    found = (refs[need] if isinstance(need, int) else need for need in draft.needs)
                    needs[number, end] = [(need.pack, need.offset) for need in found]
                refs.append(Ref(pool, number, end, draft.length, draft.check, None, draft.linked))
                parts += draft.parts
                offsets.append(end)
                if draft.relocates:
                    pack.relocations = end
                end += draft.length
            answers.append(refs)
        if parts:
            self._write(pack, parts, end)
            pack.extents += len(offsets)
            self._held.add(pack.id, offsets, needs)
        if None in calls or pack.end >= self._pack_bytes:
            unsealed = self._finish(pack)
            if unsealed is not None:
                return [unsealed if call is None else refs for call, refs in zip(calls, answers, strict=True)]
        return answers

    def _ready(self, size: int) -> _Pack:
        """The open pack, or a new one, with room for ``size`` bytes under the pool's limit."""
        zeros = self._pack.size - self._pack.end if self._pack is not None else 0  # counted when written
        if size and size + HEADER > zeros:
            self._quota.require(size + HEADER - zeros)
        if self._pack is None:
            self._pack = self._begin()
        return self._pack

    def _begin(self) -> _Pack:
        while True:
            self._serial += 1
            number = pack_id(self._gate.writer, self._serial)
            path = self._folder.path_of(number)
            self._quota.refresh()
            try:
                file = self._folder.disk.open(path)
                self._held.begin(number, file)
            except FileExistsError:  # of an earlier writer that drew the same id
                continue
            except OSError as error:
                raise refusal(error, str(path)) from error
            return _Pack(number, path, file)

    def _write(self, pack: _Pack, parts: list[bytes | memoryview], end: int) -> None:
        """Write behind the pack's durable end, sync, and make sure that it counts."""
        disk, start = self._folder.disk, pack.end
        if not pack.begun:
            parts.insert(0, PackHeader(self._folder.id, pack.id, self._gate.writer).encode())
            start = 0
        if end - start <= JOIN_BYTES:
            parts = [b"".join(parts)]
        synced = False
        try:
            size = self._put(pack, parts, start, end)
            synced = True
            disk.sync_data(pack.file)
            if start == 0:
                disk.sync_folder(self._folder.packs)
            grown, pack.size = size - pack.size, size
            pack.end, pack.begun = end, True
        except OSError as error:
            self._cut(pack, keep=not synced)
            raise refusal(error, str(pack.path)) from error
        except BaseException:
            self._cut(pack, keep=False)
            raise
        self._quota.add(grown)
        self._gate.check()

    def _put(self, pack: _Pack, parts: list[bytes | memoryview], start: int, end: int) -> int:
        """Write ``parts``, with zeros behind them where the file grows; returns how long it is then.

        Zeros for which there is no room are left out, for good: they take it from nobody.
        """
        disk = self._folder.disk
        if pack.begun and pack.ahead and end > pack.size and (zeros := self._ahead.zeros(start, end)):
            try:
                disk.write_at(pack.file, [*parts, zeros], start)
                return end + len(zeros)
            except OSError as error:
                if not isinstance(refusal(error, ""), StoreFull):
                    raise
                pack.ahead = False
                disk.truncate(pack.file, start)
        disk.write_at(pack.file, parts, start)
        return max(end, pack.size)

    def _cut(self, pack: _Pack, *, keep: bool) -> None:
        """Cut the pack back to its durable end; after anything but a failed write, never touch it again.

        Cut in any case: what a failed sync left in the page cache would read as if it were on the disk.
        """
        disk = self._folder.disk
        with contextlib.suppress(OSError):
            pack.size = pack.end if pack.begun else 0
            disk.truncate(pack.file, pack.size)
            if keep:
                disk.sync_data(pack.file)
                return
        self._pack = None
        self._held.end(pack.id)
        os.close(pack.file)

    def _finish(self, pack: _Pack) -> StoreError | None:
        """Seal the open pack, or remove it if nothing was published in it; returns what went wrong.

        A pack without a seal is whole as well: it counts as open until this writer ends.
        """
        disk = self._folder.disk
        self._pack = None
        try:
            if not pack.begun:
                disk.unlink(pack.path)
                return None
            disk.write_at(pack.file, [Seal(pack.end, pack.extents, pack.relocations).encode()], pack.end)
            if pack.size > pack.end + HEADER:  # a seal is one at the end of the file only
                disk.truncate(pack.file, pack.end + HEADER)
            disk.sync_data(pack.file)
        except OSError as error:
            return refusal(error, str(pack.path))
        finally:
            self._held.end(pack.id)
            os.close(pack.file)
        return None


@dataclass(slots=True)
class _Pack:
    """The open pack.

    Attributes:
        end: where its durable extents end.
        size: how long the file is; from ``end`` on it has zeros.
        ahead: whether there is room for more of them than it needs.
        begun: whether there is an extent.
    """

    id: int
    path: Path
    file: int
    end: int = HEADER
    size: int = 0
    ahead: bool = True
    extents: int = 0
    relocations: int = 0
    begun: bool = False


def _weight(drafts: Sequence[Drafted] | None) -> int:
    if drafts is None:
        return 0
    return drafts[0].length if len(drafts) == 1 else sum([draft.length for draft in drafts])
