"""What a live writer published and nobody owns yet: kept from collection by a lock on its pack.

A writer holds each of its packs under a shared flock until every publication in it is settled: owned by
somebody, or given up. The kernel lets the locks go when the process dies, and then what nobody owns is
nobody's. Settling costs the catalogue nothing, and the catalogue need not know what was published.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Sequence

from spillover.pool.layout import ALIGN
from spillover.pool.reference import Ref

__all__ = ["Held"]


class Held:
    """The unsettled publications of one writer. Threads may share it."""

    def __init__(self) -> None:
        self._packs: dict[int, _Pack] = {}
        self._lock = threading.Lock()

    def begin(self, pack: int, file: int) -> None:
        """Lock a new pack, open as ``file``, which stays the caller's."""
        fcntl.flock(file, fcntl.LOCK_SH)
        with self._lock:
            self._packs[pack] = _Pack(os.dup(file))

    def add(self, pack: int, offsets: Sequence[int]) -> None:
        """Hold the publications that begin at ``offsets``."""
        with self._lock:
            self._packs[pack].add(offsets)

    def end(self, pack: int) -> None:
        """The pack grows no more: let it go once all of it is settled."""
        with self._lock:
            self._packs[pack].ended = True
            self._drop(pack)

    def settle(self, refs: Iterable[Ref]) -> None:
        """Hold these publications no longer."""
        with self._lock:
            for ref in refs:
                if (pack := self._packs.get(ref.pack)) is not None:
                    pack.remove(ref.offset)
                    self._drop(ref.pack)

    def close(self) -> None:
        """Let everything go."""
        with self._lock:
            for pack in self._packs.values():
                os.close(pack.file)
            self._packs.clear()

    def forget(self) -> None:
        """Close the descriptors that a forked child inherited; the parent keeps the locks."""
        self._lock = threading.Lock()  # a thread that does not exist here may have held it
        self.close()

    def _drop(self, number: int) -> None:
        pack = self._packs[number]
        if pack.ended and not pack.count:
            os.close(pack.file)
            del self._packs[number]


class _Pack:
    """One bit for every 64 bytes of a pack: whether an unsettled publication begins there."""

    __slots__ = ("bits", "count", "ended", "file")

    def __init__(self, file: int) -> None:
        self.file = file
        self.bits = bytearray()
        self.count = 0
        self.ended = False

    def add(self, offsets: Sequence[int]) -> None:
        if offsets:
            self.bits.extend(bytes(offsets[-1] // ALIGN // 8 + 1 - len(self.bits)))
        for offset in offsets:
            byte, bit = divmod(offset // ALIGN, 8)
            self.bits[byte] |= 1 << bit
        self.count += len(offsets)

    def remove(self, offset: int) -> None:
        byte, bit = divmod(offset // ALIGN, 8)
        if byte < len(self.bits) and self.bits[byte] >> bit & 1:
            self.bits[byte] &= ~(1 << bit)
            self.count -= 1
