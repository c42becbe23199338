"""What a mean over rows may be taken for: bootstrap intervals, and pass@k.

Rows are drawn with replacement, each with all its samples, as the answers to one row are not independent of
each other. The interval lies between the percentiles of the means of `RESAMPLES` such draws (Efron 1979), by
a fixed seed: the same scores have the same interval everywhere, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["RESAMPLES", "Floats", "Interval", "intervals", "pass_at"]

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
LEVEL = 0.95
SEED = 20261130
FEW = 16
"""Below one distinct value in this many rows, how often each is drawn says it all."""
ROUND = 1 << 22
"""Rows drawn at a time: 32 MB of numbers."""


def intervals(columns: Sequence[Floats], resamples: int = RESAMPLES) -> list[Interval | None]:
    """The 95 % interval of the mean of each column of row scores; None for a column without rows.

    Columns of one length are resampled by the same draws.
    """
    found: list[Interval | None] = [None] * len(columns)
    many: dict[int, list[int]] = {}
    for place, column in enumerate(columns):
        if not column.size:
            continue
        values, counts = np.unique(column, return_counts=True)
        if values.size * FEW <= column.size or values.size == 1:
            found[place] = _between(_counted(values, counts, resamples))
        else:
            many.setdefault(column.size, []).append(place)
    for places in many.values():
        means = _drawn(np.stack([columns[place] for place in places], axis=1), resamples)
        for place, drawn in zip(places, means.T, strict=True):
            found[place] = _between(drawn)
    return found


def pass_at(right: NDArray[np.int64], samples: int, k: int) -> Floats:
    """For each row, the chance that one of ``k`` samples is right, when ``right`` of ``samples`` were.

    The estimator without bias, 1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374.
    """
    wrong = (samples - right).astype(np.float64)
    missing = np.ones(right.shape)
    for place in range(k):
        missing *= np.maximum(0.0, wrong - place) / (samples - place)
    return 1.0 - missing


def _counted(values: Floats, counts: NDArray[np.int64], resamples: int) -> Floats:
    """Means of resamples of few distinct values: their counts are multinomial, whatever the order."""
    rows = int(counts.sum())
    drawn = np.random.default_rng(SEED).multinomial(rows, counts / rows, size=resamples)
    means: Floats = drawn @ values / rows
    return means


def _drawn(scores: Floats, resamples: int) -> Floats:
    """Means ``[resamples, columns]`` of resampled rows of ``scores`` ``[rows, columns]``."""
    rows, columns = scores.shape
    source = np.random.default_rng(SEED)
    means = np.empty((resamples, columns))
    step = max(1, ROUND // rows)
    for start in range(0, resamples, step):
        draws = min(step, resamples - start)
        times = np.empty((draws, rows))
        for place in range(draws):
            times[place] = np.bincount(source.integers(rows, size=rows), minlength=rows)
        means[start : start + draws] = times @ scores / rows
    return means


def _between(means: Floats) -> Interval:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
