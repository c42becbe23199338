"""Dropout without a random stream: a mask is a pure function of where it is used.

The key is (seed, step, sequence of the step, layer, module), so that neither a resume nor the split of a step
into micro-batches and passes changes it. Bits come from Philox (Salmon et al., SC11) through numpy, alike on
every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LEVELS = 1 << 16


@dataclass
class Dropout:
    """Masks for the pass in hand; `sequences` are (number within the step, tokens) pairs."""

    rate: float
    seed: int
    step: int = 0
    sequences: Sequence[tuple[int, int]] = ()

    def mask(self, layer: int, module: str, x: Tensor) -> Tensor:
        """0 where an element of ``x`` ``[N, in]`` is dropped and ``1 / (1 - rate)`` where it is kept.

        Rows after those of `sequences` are padding: 0.
        """
        width = x.shape[1]
        rows = [
            self._bits(f"{number} {layer} {module}", length * width).reshape(length, width)
            for number, length in self.sequences
        ]
        kept = np.concatenate(rows) >= round(self.rate * _LEVELS)
        mask = torch.zeros_like(x)
        mask[: len(kept)] = torch.from_numpy(kept).to(x.device)
        return mask.mul_(1 / (1 - self.rate))

    def _bits(self, place: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        key = hashlib.blake2b(f"{self.seed} {self.step} {place}".encode(), digest_size=16).digest()
        words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-count // 4))
        return np.asarray(words, dtype="<u8").view("<u2")[:count]
