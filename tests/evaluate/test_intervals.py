"""Intervals and comparisons against computations of another kind."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from spillover.evaluate import compared, intervals, mcnemar, pass_at


def slowly(column: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    """The bootstrap as it is written in books: draw rows, take the mean, look at the percentiles."""
    source = np.random.default_rng(seed)
    means = [column[source.integers(0, column.size, column.size)].mean() for _ in range(resamples)]
    return tuple(np.percentile(means, [2.5, 97.5]))


@pytest.mark.parametrize("kind", ["few values", "many values"])
def test_the_interval_is_the_bootstrap_of_the_mean(kind: str) -> None:
    source = np.random.default_rng(1)
    column = (source.random(400) < 0.3).astype(float) if kind == "few values" else source.random(400) ** 3
    (found,) = intervals([column])
    assert found is not None
    wanted = np.mean([slowly(column, 2000, seed) for seed in range(5)], axis=0)
    width = wanted[1] - wanted[0]
    assert np.abs(np.array(found) - wanted).max() < 0.06 * width
    # and both are near to what the central limit theorem says of so many rows
    half = 1.96 * column.std() / math.sqrt(column.size)
    assert found == pytest.approx((column.mean() - half, column.mean() + half), abs=0.25 * half)


def test_both_ways_to_draw_agree() -> None:
    column = np.repeat([0.0, 0.25, 1.0], [500, 300, 200])
    (counted,) = intervals([column])
    (drawn,) = intervals([column + np.linspace(0, 1e-9, column.size)])  # as many values as rows
    assert counted == pytest.approx(drawn, abs=0.004)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = np.random.default_rng(7)
    columns = [(source.random(150) < 0.4).astype(float) for _ in range(400)]
    covered = sum(found is not None and found[0] <= 0.4 <= found[1] for found in intervals(columns))
    assert 0.90 < covered / 400 < 0.98


def test_the_same_scores_have_the_same_interval_whatever_stands_beside_them() -> None:
    one, two = np.random.default_rng(0).random((2, 300))
    alone = intervals([one])[0]
    assert alone == intervals([one])[0]
    assert alone == pytest.approx(intervals([two, one])[1], abs=1e-12)
    assert alone == pytest.approx(intervals([one, np.ones(300)])[0], abs=1e-12)


def test_edges() -> None:
    assert intervals([np.array([]), np.array([0.5]), np.ones(9)]) == [None, (0.5, 0.5), (1.0, 1.0)]


@pytest.mark.parametrize(("samples", "k"), [(5, 1), (5, 2), (5, 3), (5, 5), (1, 1)])
def test_pass_at_k_is_the_share_of_the_draws_with_a_right_one(samples: int, k: int) -> None:
    for right in range(samples + 1):
        outcomes = [1] * right + [0] * (samples - right)
        draws = [max(draw) for draw in itertools.combinations(outcomes, k)]
        (found,) = pass_at(np.array([right]), samples, k)
        assert found == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 5), (9, 2), (2, 9), (40, 12), (600, 500)])
def test_mcnemar_is_the_exact_sum(better: int, worse: int) -> None:
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    wanted = min(Fraction(1), Fraction(2 * tail, 2**n)) if n else Fraction(1)
    assert mcnemar(better, worse) == pytest.approx(float(wanted), rel=1e-9)


def test_mcnemar_of_many_rows_is_neither_slow_nor_lost() -> None:
    assert mcnemar(50_000, 50_000) == 1.0
    assert 0.0 < mcnemar(50_600, 49_400) < 0.001
    assert mcnemar(300_000, 0) == 0.0  # 2 ** -299999: less than any float


def test_a_comparison_counts_only_rows_that_both_have() -> None:
    one = np.array([1, 1, 0, np.nan, 1, 0.0])
    two = np.array([0, 1, 1, 1, np.nan, 0.0])
    (found,) = compared([(one, two)])
    assert (found.n, found.better, found.worse, found.difference, found.p) == (4, 1, 1, 0.0, 1.0)


def test_a_comparison_is_paired() -> None:
    """Models that fail on the same rows differ less than their intervals let one think."""
    base = np.repeat([0.0, 1.0], 200)
    ahead = base.copy()
    ahead[:20] = 1.0
    (found,) = compared([(ahead, base)])
    apart = intervals([ahead, base])
    assert apart[0] is not None and apart[1] is not None and apart[0][0] < apart[1][1]
    assert found.interval is not None and found.interval[0] > 0
    assert found.difference == pytest.approx(0.05)
    assert found.p == pytest.approx(2 * 0.5**20)


def test_scores_between_0_and_1_have_no_mcnemar() -> None:
    (found,) = compared([(np.array([0.5, 1.0]), np.array([0.0, 1.0]))])
    assert found.p is None and found.interval is not None
    (none,) = compared([(np.array([np.nan]), np.array([1.0]))])
    assert (none.n, none.difference, none.interval, none.p) == (0, None, None, None)
