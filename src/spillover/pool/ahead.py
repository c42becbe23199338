"""Zeros written ahead of a pack's end, so that most syncs have no change of the file's size to commit.

A sync of bytes inside a file waits for these bytes. One of a file that has grown waits for the filesystem's
journal as well, which takes about as long again. So a small write that makes a pack longer puts zeros behind
itself, into which the next ones go. They mean nothing to whoever reads: an extent is whole or it is none, and
zeros are none. Sealing the pack cuts them off; behind the pack of a writer that died they stay.

Only where a file is overwritten in place. Elsewhere the bytes would be written, or sent over the network,
twice for nothing.
"""

from __future__ import annotations

from spillover.pool.folder import Folder
from spillover.pool.quota import Quota
from spillover.store.filesystem import filesystem

__all__ = ["Ahead"]

IN_PLACE = frozenset("ext2 ext3 ext4 jfs overlay xfs".split())
"""Filesystem types that overwrite in place; what overlay does is up to what lies below it."""
LEAST, MOST = 1 << 16, 1 << 20
"""A pack gets as much ahead as it has, within these bounds."""
PAGE = 4096
_ZEROS = memoryview(bytes(MOST))


class Ahead:
    """How far one writer goes ahead.

    Args:
        folder: the pool.
        quota: the room it has.
        pack_bytes: size at which a pack is sealed, where nothing is to follow.
    """

    def __init__(self, folder: Folder, quota: Quota, pack_bytes: int) -> None:
        self._stop = pack_bytes if filesystem(folder.path) in IN_PLACE else 0
        self._quota = quota

    def zeros(self, start: int, end: int) -> memoryview:
        """The zeros to go behind a write from ``start`` to ``end``; none behind one that is large itself."""
        wanted = min(max(LEAST, end), MOST)
        if end - start > wanted // 4:
            return _ZEROS[:0]
        size = min(wanted, self._stop - end, self._quota.spare(wanted, end - start))
        return _ZEROS[: max(0, (end + size) // PAGE * PAGE - end)]
