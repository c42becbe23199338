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


def test_the_last_possible_token_ends_the_range():
    logits = np.array([0.0, 0.0, -np.inf], dtype=np.float32)
    assert sample(logits, Sampling(temperature=1.0), np.nextafter(1.0, 0.0)) == 1


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1}], ids=str
)
def test_values_out_of_range_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        check(Sampling(**wrong))
