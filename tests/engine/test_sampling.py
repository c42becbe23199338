from __future__ import annotations

import numpy as np
import pytest

from spillover.engine import Sampling
from spillover.engine.sampling import check, distribution, sample, uniform
from spillover.errors import InputError

LOGITS = np.array([1.5, -0.5, 0.0, 2.0, -3.0, 0.7, 0.7, -1.2], dtype=np.float32)
DRAWS = 20_000
# chi-square's 99.9th percentile by degrees of freedom; the draws are fixed, so this never flickers
BOUND = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def exact(sampling: Sampling) -> np.ndarray:
    """The definition, written the slow way."""
    p = np.exp(LOGITS.astype(np.float64) / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = set(order)
    if sampling.top_k:
        keep = {i for i in keep if p[i] >= p[order[sampling.top_k - 1]]}
    rest = sum(p[i] for i in keep)
    if sampling.top_p < 1:
        reached, nucleus = 0.0, set()
        for i in order:
            if i in keep and reached < sampling.top_p:
                nucleus.add(i)
                reached += p[i] / rest
        keep = nucleus
    keep = {i for i in keep if p[i] >= sampling.min_p * p.max()}
    q = np.array([p[i] if i in keep else 0.0 for i in range(len(p))])
    return q / q.sum()


RULES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=4),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.3, min_p=0.15),
    Sampling(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", RULES, ids=str)
def test_draws_have_the_exact_probabilities(sampling):
    want = exact(sampling)
    counts = np.zeros(len(LOGITS))
    for i in range(DRAWS):
        counts[sample(LOGITS, sampling, uniform(5, "row", i))] += 1
    possible = want > 0
    assert counts[~possible].sum() == 0
    expected = want[possible] * DRAWS
    chi = ((counts[possible] - expected) ** 2 / expected).sum()
    assert chi < BOUND[int(possible.sum()) - 1]


@pytest.mark.parametrize("sampling", RULES, ids=str)
def test_distribution_matches_the_definition(sampling):
    kept, p = distribution(LOGITS, sampling)
    full = np.zeros(len(LOGITS))
    full[slice(None) if kept is None else kept] = p
    np.testing.assert_allclose(full, exact(sampling), atol=1e-6)


def test_uniform_depends_on_seed_row_and_index_alone():
    assert uniform(1, "a", 2) == uniform(1, "a", 2)
    assert len({uniform(1, "a", 2), uniform(2, "a", 2), uniform(1, "b", 2), uniform(1, "a", 3)}) == 4
    values = np.array([uniform(0, f"row-{i}", j) for i in range(100) for j in range(100)])
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.88  # 9 degrees of freedom, 99.9 %


@pytest.mark.parametrize("size", [3, 128, 300, 1000])
def test_the_last_possible_token_ends_the_range(size):
    logits = np.full(size, -np.inf, dtype=np.float32)
    logits[:2] = 0
    assert sample(logits, Sampling(temperature=1.0), np.nextafter(1.0, 0.0)) == 1


def plain(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What may be chosen, over all tokens sorted, without a shortcut."""
    p = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    if sampling.top_k:
        p[p < np.sort(p)[-sampling.top_k]] = 0
    p /= p[p > 0].sum()
    ordered = np.sort(p)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), sampling.top_p))
    floor = ordered[min(last, p.size - 1)] if sampling.top_p < 1 else 0
    return (p >= max(floor, np.float32(sampling.min_p) * p.max())) & (p > 0)


@pytest.mark.parametrize("spread", [0.01, 1, 4, 20])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=1.0, top_p=0.9995),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.3, top_k=500),
        Sampling(temperature=0.7, top_k=60, top_p=0.8, min_p=0.01),
    ],
    ids=str,
)
def test_a_vocabulary_of_real_size_needs_no_sorting_of_all(sampling, spread):
    logits = np.random.default_rng(3).normal(0, spread, 30_001).astype(np.float32).round(3)  # with equals
    kept, p = distribution(logits, sampling)
    assert kept is not None
    np.testing.assert_array_equal(kept, np.flatnonzero(plain(logits, sampling)))
    order = np.cumsum(p, dtype=np.float64)
    for u in (0.0, 0.1, 0.5, 0.999):
        assert sample(logits, sampling, u) == kept[np.searchsorted(order, u * order[-1], side="right")]


def test_a_draw_over_all_tokens_is_the_inverse_of_the_distribution():
    logits = np.random.default_rng(4).normal(0, 2, 30_001).astype(np.float32)
    kept, p = distribution(logits, Sampling(temperature=1.0))
    assert kept is None
    order = np.cumsum(p, dtype=np.float64)
    for u in np.linspace(0, 0.9999, 300):
        wanted = np.searchsorted(order, u * order[-1], side="right")
        assert sample(logits, Sampling(temperature=1.0), u) == wanted


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1}], ids=str
)
def test_values_out_of_range_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        check(Sampling(**wrong))
