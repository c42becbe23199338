"""Axes and curves: round numbers to mark, numbers as text, fewer points, smoother ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["Curve", "labels", "smoothed", "thinned", "ticks"]

Curve = list[tuple[float, float]]
"""Pairs of x and y, in the order of x."""

COLUMNS = 600
"""Columns of a chart in which a curve shows no more than its least and its greatest value."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover ``low`` to ``high``: ``most`` or a few more."""
    if not high > low:
        spread = abs(low) / 2 or 1.0
        low, high = (0.0, 2 * low) if low > 0 else (low - spread, high + spread)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def labels(marks: Sequence[float]) -> list[str]:
    """The marks of an axis as text, all with the same number of decimals."""
    step, most = marks[1] - marks[0], max(abs(mark) for mark in marks)
    if most >= 1e7 or most < 1e-2:
        return ["0" if mark == 0 else _scientific(mark) for mark in marks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{mark + 0.0:,.{decimals}f}" for mark in marks]


def thinned(curve: Curve, columns: int = COLUMNS) -> Curve:
    """At most the first, the least, the greatest and the last point of each column."""
    if len(curve) <= 4 * columns:
        return curve
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / columns or 1.0
    kept: Curve = []
    for _, group in itertools.groupby(
        curve, key=lambda point: min(columns - 1, int((point[0] - start) / width))
    ):
        points = [*group]
        low, high = (pick(range(len(points)), key=lambda n: points[n][1]) for pick in (min, max))
        kept += [points[number] for number in sorted({0, low, high, len(points) - 1})]
    return kept


def smoothed(curve: Curve, span: float) -> Curve:
    """The exponential moving average over about ``span`` points, corrected for its beginning."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    result: Curve = []
    for x, y in curve:
        total, weight = keep * total + y, keep * weight + 1
        result.append((x, total / weight))
    return result


def _scientific(value: float) -> str:
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
