"""How fast the work goes, when it will be over, and how near to what bounds it."""

from __future__ import annotations

import time
from collections import deque

from spillover.engine.estimate import Bound, Estimate, Speed, Traffic

__all__ = ["Pace", "Share", "forecast"]

REMEMBERED = 64
"""Quanta that the rate looks back on: it follows a change of speed and ignores a single hiccup."""

SHORTEST, LONGEST = 0.5, 30.0
"""Seconds that a share of the bound covers at least, and about at most."""


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


class Share:
    """The share of what bounds the work that it reached over the last seconds."""

    def __init__(self, speed: Speed | None) -> None:
        self._limits = speed.limits if speed else None
        self._seen: deque[tuple[float, Traffic]] = deque([(time.monotonic(), Traffic())])

    def of(self, traffic: Traffic) -> dict[str, Bound | float | None]:
        """``bound`` and ``share`` for an event, after `traffic` in all; None while they are not known."""
        now = time.monotonic()
        since, before = self._seen[0]
        if self._limits is None or now - since < SHORTEST:
            return {"bound": None, "share": None}
        bound, least = (traffic - before).bound(self._limits)
        if now - self._seen[-1][0] >= SHORTEST:
            self._seen.append((now, traffic))
            while self._seen[1][0] < now - LONGEST:
                self._seen.popleft()
        return {"bound": bound, "share": round(least / (now - since), 3)}


def forecast(estimate: Estimate, quanta: int, unit: str, condition: str = "") -> str:
    """For people: what bounds the work, how long it will take, and at which rates.

    `quanta` of `unit` are to be done; `condition` is what the seconds depend on.
    """
    rates = f"{_figure(quanta / estimate.seconds)} {unit}/s, {estimate.tokens_per_s:,.0f} tokens/s"
    about = f"{'roughly' if estimate.rough else 'about'} {_duration(estimate.seconds)}"
    better = "; spill doctor --measure makes that exact" if estimate.rough else ""
    return f"bound by {estimate.bound}, {about}{condition} ({rates}{better})"


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{_figure(seconds / size)} {unit}"
    return f"{_figure(seconds)} s"
