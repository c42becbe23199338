"""Whether this process still owns the pool, by what is written there now.

Guarantee: `Proof.check` returns only if the control object names this generation at some moment during the
call. Nothing that was read before counts, unless the very same file still lies there.

A control object is never written in place: a transition renames a new file over it. On a local disk the
file that was read is therefore kept open, so that no other can get its inode, and asking for the inode at its
path tells in microseconds whether it is still there. A network mount may answer that from a cache, but opens
a file only after asking the server, so there the object is read each time.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from spillover.errors import Superseded
from spillover.state import control
from spillover.state.ownership import CONTROL
from spillover.store import LocalStore
from spillover.store.filesystem import is_local

__all__ = ["Proof"]


class Proof:
    """What a coordinator asks after every commit. Threads may share it.

    Args:
        store: holds the control object.
        generation: of this process.
    """

    def __init__(self, store: LocalStore, generation: int) -> None:
        self._store = store
        self._path: Path = store.root / CONTROL
        self._generation = generation
        self._local = is_local(store.root)
        self._kept: _Kept | None = None
        self._seen = b""

    def check(self) -> None:
        """Return if the control object names this generation.

        Raises:
            Superseded: it names another one.
            StoreError: it cannot be read.
        """
        kept = self._kept  # open for as long as it is compared, whatever other threads do
        with contextlib.suppress(OSError):  # which reading it will explain
            if kept is not None and kept.identity == _identity(os.stat(self._path)):
                return
            kept = _Kept(self._path) if self._local else None
        data = self._store.read(CONTROL).data  # opened after `kept`: if that is still there, it is this one
        if data != self._seen:
            self._require_mine(data)
            self._seen = data
        self._kept = kept

    def close(self) -> None:
        """Keep no file open."""
        self._kept = None

    def _require_mine(self, data: bytes) -> None:
        document = control.decode(data, f"{self._store.uri}/{CONTROL}")
        if document.status != "running" or document.generation != self._generation:
            mine, now = self._generation, document.generation
            raise Superseded(f"generation {mine} lost the queues: generation {now} has them")


class _Kept:
    """An open file, so that its identity stays its own."""

    __slots__ = ("_file", "identity")

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.identity = _identity(os.fstat(self._file))

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            os.close(file)


def _identity(state: os.stat_result) -> tuple[int, int, int, int]:
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size
