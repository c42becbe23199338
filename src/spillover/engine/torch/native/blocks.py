"""Who uses which block of the cache, and which blocks hold a beginning that another row may share.

A full block of a prompt is known by a digest of everything up to its end. A row whose prompt begins alike
takes the block as it is: it was computed once and is stored once. A block that no row uses any more stays
known until its memory is wanted, the longest unused first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from spillover.engine.torch.native.library import BLOCK


def needed(tokens: int) -> int:
    """Blocks that `tokens` positions take."""
    return -(-tokens // BLOCK)


def digests(tokens: Sequence[int], adapter: int) -> list[bytes]:
    """One for each full block of `tokens`, covering all before it and the adapter that computed it."""
    result, digest = [], adapter.to_bytes(8, "little", signed=True)
    data = np.asarray(tokens, np.int64).tobytes()
    for start in range(0, len(tokens) // BLOCK * BLOCK * 8, BLOCK * 8):
        digest = hashlib.blake2b(digest + data[start : start + BLOCK * 8], digest_size=16).digest()
        result.append(digest)
    return result


class Blocks:
    """`count` blocks, each free, in use by some rows, or idle: unused but still known."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._fresh = list(range(count - 1, -1, -1))
        self._known: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._fresh) + len(self._idle)

    def take(self) -> int:
        """A block for one row, its content undefined; ``IndexError`` when all are in use."""
        if self._fresh:
            block = self._fresh.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._digest.pop(block)]
        else:
            raise IndexError("every block of the cache is in use")
        self._users[block] = 1
        return block

    def share(self, digest: bytes) -> int | None:
        """The block known by `digest`, now used by one row more."""
        block = self._known.get(digest)
        if block is not None:
            self._idle.pop(block, None)
            self._users[block] += 1
        return block

    def know(self, block: int, digest: bytes) -> None:
        """From now on `share` may give `block` out."""
        if digest not in self._known:
            self._known[digest] = block
            self._digest[block] = digest

    def leave(self, block: int) -> None:
        """One row uses `block` no longer."""
        self._users[block] -= 1
        if not self._users[block]:
            if block in self._digest:
                self._idle[block] = None
            else:
                self._fresh.append(block)
