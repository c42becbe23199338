"""The order of training examples: a pure function of the seed and the micro-batch's number.

Nothing is carried from one micro-batch to the next, so that a job which knows how many it has done continues
with exactly the one that an uninterrupted job would have taken.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW = 64  # the most micro-batches sorted by length together


class Order:
    """Which examples each micro-batch holds; every epoch holds every example exactly once.

    Each epoch shuffles all examples, cuts them into windows, sorts each window by length and shuffles the
    micro-batches. A micro-batch therefore holds examples of nearly one length and wastes little on padding.
    A window has as many micro-batches as there are windows, up to `WINDOW`: sorting a small set as a whole
    would put the same examples together in every epoch. The last micro-batch cut may be smaller.

    Random numbers are raw 64-bit outputs of Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011) keyed by (seed, epoch), and shuffling is a stable sort by them: unlike the methods of
    NumPy's generators, neither changes between NumPy's versions.

    Args:
        lengths: tokens of each example, [N].
        batch: examples a micro-batch.
        seed: any integer; its lowest 64 bits count.

    Attributes:
        per_epoch: micro-batches an epoch.
    """

    def __init__(self, lengths: NDArray[np.int64], batch: int, seed: int) -> None:
        if not len(lengths) or batch < 1:
            raise ValueError(f"no order of {len(lengths)} examples in micro-batches of {batch}")
        self.batch_size = batch
        self.seed = seed
        self.per_epoch = -(-len(lengths) // batch)
        self._lengths = np.asarray(lengths)
        self._epoch = -1
        self._examples: NDArray[np.int64] = np.empty(0, np.int64)
        self._slots: NDArray[np.int64] = np.empty(0, np.int64)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Example indices of micro-batch ``number``, counted from 0 over all epochs; at most ``batch``."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._examples, self._slots = self._shuffled(epoch)
            self._epoch = epoch
        start = int(self._slots[place]) * self.batch_size
        return self._examples[start : start + self.batch_size]

    def _shuffled(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """An epoch's examples as they are cut, [N], and the cut taken at each place, [per_epoch]."""
        count = len(self._lengths)
        key = np.array([self.seed % 2**64, epoch], np.uint64)
        raw = np.random.Philox(key=key).random_raw(count + self.per_epoch)
        examples = np.argsort(raw[:count], kind="stable")
        windows = np.arange(count) // (min(WINDOW, isqrt(self.per_epoch)) * self.batch_size)
        by_length = np.lexsort((self._lengths[examples], windows))  # stable, so ties stay shuffled
        return examples[by_length], np.argsort(raw[count:], kind="stable")
