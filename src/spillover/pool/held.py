"""What a live writer published and nobody owns yet: kept from collection by a lock on its pack.

A writer holds each of its packs under a shared flock until every publication in it is settled: owned by
somebody, or given up. The kernel lets the locks go when the process dies, and then what nobody owns is
nobody's. Settling costs the catalogue nothing, and the catalogue need not know what was published.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from spillover.pool.layout import ALIGN
from spillover.pool.reference import Ref

__all__ = ["Held", "Place"]

Place = tuple[int, int]
"""Pack and offset of a publication."""


class Held:
    """The unsettled publications of one writer. Threads may share it."""

    def __init__(self) -> None:
        self._packs: dict[int, _Pack] = {}
        self._needs: dict[Place, list[Place]] = {}
        self._needed: Counter[Place] = Counter()
        self._lock = threading.Lock()

    def begin(self, pack: int, file: int) -> None:
        """Lock a new pack, open as ``file``, which stays the caller's."""
        fcntl.flock(file, fcntl.LOCK_SH)
        with self._lock:
            self._packs[pack] = _Pack(os.dup(file))

    def add(self, pack: int, offsets: Sequence[int], needs: Mapping[Place, list[Place]]) -> None:
        """Hold the publications that begin at ``offsets``; nothing is held after `close`.

        Args:
            needs: what some of them depend on. Of that, what is held here too is settled with the last that
                needs it.
        """
        with self._lock:
            if (found := self._packs.get(pack)) is not None:
                found.add(offsets)
                for place, found_needs in needs.items():
                    self._needs[place] = [need for need in found_needs if need[0] in self._packs]
                    self._needed.update(self._needs[place])

    def end(self, pack: int) -> None:
        """The pack grows no more: let it go once all of it is settled."""
        with self._lock:
            if (found := self._packs.get(pack)) is not None:
                found.ended = True
                self._drop(pack)

    def settle(self, refs: Iterable[Ref]) -> None:
        """Hold these publications no longer."""
        todo = [(ref.pack, ref.offset) for ref in refs]
        with self._lock:
            while todo:
                place = todo.pop()
                if (pack := self._packs.get(place[0])) is not None:
                    pack.remove(place[1])
                    self._drop(place[0])
                for need in self._needs.pop(place, ()):
                    self._needed[need] -= 1
                    if not self._needed[need]:
                        del self._needed[need]
                        todo.append(need)

    def close(self) -> None:
        """Let everything go."""
        with self._lock:
            for pack in self._packs.values():
                os.close(pack.file)
            self._packs.clear()
            self._needs.clear()
            self._needed.clear()

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
