"""Two models on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spillover.evaluate.intervals import Floats, Interval, intervals

__all__ = ["Comparison", "compared", "mcnemar"]


@dataclass(frozen=True)
class Comparison:
    """How far a model is ahead of another on the ``n`` rows that both have a score on.

    Attributes:
        difference: of the means; above 0 it is ahead.
        interval: the 95 % interval of that, by resampling rows, None without any.
        better, worse: rows on which its score is higher, and lower.
        p: `mcnemar`'s, where all scores are 0 or 1; else None.
    """

    n: int
    difference: float | None
    interval: Interval | None
    better: int
    worse: int
    p: float | None


def compared(pairs: Sequence[tuple[Floats, Floats]]) -> list[Comparison]:
    """Compare row scores with those of a baseline, for each pair ``(scores, baseline)``; NaN is no score."""
    both = [(a[(seen := ~np.isnan(a) & ~np.isnan(b))], b[seen]) for a, b in pairs]
    found = intervals([a - b for a, b in both])
    return [_comparison(a, b, interval) for (a, b), interval in zip(both, found, strict=True)]


def mcnemar(better: int, worse: int) -> float:
    """The two-sided exact p of McNemar's test (1947): how likely rows that differ split so, if by fair coin.

    Twice the binomial tail, sum of C(n, i) / 2^n for i up to the smaller count, at most 1.
    """
    n, least = better + worse, min(better, worse)
    if n == 0:
        return 1.0
    terms = np.arange(least + 1, dtype=np.float64)
    # log C(n, i), each from the one before: C(n, i) = C(n, i - 1) (n - i + 1) / i
    steps = np.log(n - terms[1:] + 1) - np.log(terms[1:])
    logs = np.concatenate([[0.0], np.cumsum(steps)]) - n * np.log(2.0)
    return float(min(1.0, 2.0 * np.exp(logs).sum()))


def _comparison(a: Floats, b: Floats, interval: Interval | None) -> Comparison:
    better, worse = int((a > b).sum()), int((a < b).sum())
    binary = a.size > 0 and _binary(a) and _binary(b)
    return Comparison(
        n=int(a.size),
        difference=float((a - b).mean()) if a.size else None,
        interval=interval,
        better=better,
        worse=worse,
        p=mcnemar(better, worse) if binary else None,
    )


def _binary(scores: NDArray[np.float64]) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())
