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
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    kept: NDArray[np.intp] | None = None
    if 0 < sampling.top_k < scaled.size:
        kth = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        kept = np.flatnonzero(scaled >= kth)
        scaled = scaled[kept]
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    floor = max(_nucleus(probabilities, sampling.top_p), sampling.min_p * float(probabilities.max()))
    if floor > 0:
        chosen = np.flatnonzero(probabilities >= np.float32(floor))
        kept = chosen if kept is None else kept[chosen]
        probabilities = probabilities[chosen] / probabilities[chosen].sum()
    return kept, probabilities


def sample(logits: Floats, sampling: Sampling, u: float) -> int:
    """The token whose share of [0, 1), in order of ids, holds `u`: the inverse cumulative distribution."""
    kept, probabilities = distribution(logits, sampling)
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    place = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # u * total may round up to the total itself, past the last token that has any probability
    place = min(place, int(np.searchsorted(cumulative, cumulative[-1])))
    return place if kept is None else int(kept[place])


def _nucleus(probabilities: Floats, top_p: float) -> float:
    """The least probability in the smallest set that sums to `top_p`; 0 when that is everything."""
    if top_p >= 1:
        return 0.0
    ordered = np.sort(probabilities)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), top_p))
    return float(ordered[min(last, ordered.size - 1)])
