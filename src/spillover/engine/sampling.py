"""The choice of the next token, on numpy, alike for every engine.

Randomness is a pure function of (seed, row id, token index): a row's answer depends neither on its batch
mates nor on where an earlier run was stopped.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from spillover.engine.protocol import Floats, Sampling
from spillover.errors import InputError

_STRETCH = 128  # values that are looked at together before they are looked at one by one


def check(sampling: Sampling) -> None:
    """Raise `InputError` for the first value out of its range."""
    ranges = (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= sampling.min_p < 1, "at least 0 and below 1"),
    )
    for name, fine, allowed in ranges:
        if not fine:
            raise InputError(f"{name} is {getattr(sampling, name)}; it must be {allowed}")


def uniform(seed: int, row: str, index: int) -> float:
    """The random number in [0, 1) of the `index`-th answered token of a row, with 53 bits."""
    digest = hashlib.blake2b(
        f"{seed}\0{index}\0{row}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def distribution(logits: Floats, sampling: Sampling) -> tuple[NDArray[np.intp] | None, Floats]:
    """Token ids that may be chosen, ascending (None: all), and their probabilities, summing to 1.

    The order is temperature, top-k, top-p (Holtzman et al., arXiv 1904.09751), min-p (Nguyen et al., arXiv
    2407.01082), each over what the one before kept. Equals of the last token kept are kept too.
    """
    scaled = logits - logits.max()
    scaled /= np.float32(sampling.temperature)
    kept: NDArray[np.intp] | None = None
    if 0 < sampling.top_k < scaled.size:
        kept = np.flatnonzero(scaled >= _largest(scaled, sampling.top_k))
        scaled = scaled[kept]
    probabilities = np.exp(scaled, out=scaled)
    probabilities /= probabilities.sum()
    floor = max(_nucleus(probabilities, sampling.top_p), sampling.min_p * float(probabilities.max()))
    if floor > 0:
        chosen = np.flatnonzero(probabilities >= np.float32(floor))
        kept = chosen if kept is None else kept[chosen]
        probabilities = probabilities[chosen]
        probabilities /= probabilities.sum()
    return kept, probabilities


def sample(logits: Floats, sampling: Sampling, u: float) -> int:
    """The token whose share of [0, 1), in order of ids, holds `u`: the inverse cumulative distribution."""
    kept, probabilities = distribution(logits, sampling)
    place = _inverse(probabilities, u)
    return place if kept is None else int(kept[place])


def _inverse(probabilities: Floats, u: float) -> int:
    """The first place where the sum of `probabilities` so far exceeds `u` of their total.

    The sums are float64, of stretches first: most of them need not be looked into.
    """
    starts = np.arange(0, probabilities.size, _STRETCH)
    ends = np.cumsum(np.add.reduceat(probabilities, starts, dtype=np.float64))
    wanted = u * float(ends[-1])
    stretch = min(int(np.searchsorted(ends, wanted, side="right")), ends.size - 1)
    first = int(starts[stretch])
    before = float(ends[stretch - 1]) if stretch else 0.0
    inside = probabilities[first : first + _STRETCH]
    cumulative = before + np.cumsum(inside, dtype=np.float64)
    place = int(np.searchsorted(cumulative, wanted, side="right"))
    # the two kinds of sums round differently: stay within what has any probability
    return first + min(place, int(np.searchsorted(cumulative, cumulative[-1])))


def _largest(values: Floats, count: int) -> np.float32:
    """The `count`-th largest of `values`, of which there are more."""
    columns = values.size // _STRETCH
    if columns > count:
        # so many columns have a value of at least this: no less is among the largest
        most = values[: columns * _STRETCH].reshape(_STRETCH, columns).max(axis=0)
        values = values[values >= np.partition(most, -count)[-count]]
    found: np.float32 = np.partition(values, -count)[-count]
    return found


def _nucleus(probabilities: Floats, top_p: float) -> float:
    """The least probability in the smallest set that sums to `top_p`; 0 when that is everything."""
    if top_p >= 1:
        return 0.0
    for least in (1e-3, 1e-5, 0.0):  # sorting all takes ten times as long, and a few mostly suffice
        ordered = np.sort(probabilities[probabilities >= np.float32(least)])[::-1]
        last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), top_p))
        if last < ordered.size:
            return float(ordered[last])
    return float(ordered[-1])
