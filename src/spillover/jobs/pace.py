"""How fast the work goes and when it will be over."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["Pace"]

REMEMBERED = 64
"""Quanta that the rate looks back on: it follows a change of speed and ignores a single hiccup."""


class Pace:
    """Rates over the last quanta. A quantum has a size, such as its tokens, and ends when `add` is called."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque([time.monotonic()], maxlen=REMEMBERED + 1)
        self._sizes: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, size: float) -> float:
        """Note that a quantum of ``size`` ended; returns its seconds."""
        self._ends.append(time.monotonic())
        self._sizes.append(size)
        return self._ends[-1] - self._ends[-2]

    @property
    def per_second(self) -> float | None:
        """Size a second, None before the first quantum."""
        return sum(self._sizes) / self._elapsed if self._sizes else None

    def eta(self, remaining: int) -> float | None:
        """Seconds that ``remaining`` more quanta will take, None before the first."""
        return remaining * self._elapsed / len(self._sizes) if self._sizes else None

    @property
    def _elapsed(self) -> float:
        return max(1e-9, self._ends[-1] - self._ends[0])
