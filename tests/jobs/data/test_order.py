"""The order of examples: a pure function, every example once an epoch, other company each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.jobs.data import Example, Order, collate

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=300)
BATCH = st.integers(1, 9)
SEED = st.integers(0, 2**64 - 1)


def epoch(order: Order, number: int) -> list[list[int]]:
    first = number * order.per_epoch
    return [order.batch(m).tolist() for m in range(first, first + order.per_epoch)]


@given(LENGTHS, BATCH, SEED, st.integers(0, 10**6))
def test_every_epoch_holds_every_example_once(lengths, batch, seed, number):
    batches = epoch(Order(np.array(lengths), batch, seed), number)
    assert sorted(index for members in batches for index in members) == list(range(len(lengths)))
    sizes = sorted(len(members) for members in batches)
    assert sizes[1:] == [batch] * (len(sizes) - 1) and 1 <= sizes[0] <= batch


@given(LENGTHS, BATCH, SEED, st.lists(st.integers(0, 2000), max_size=20))
def test_a_micro_batch_depends_on_nothing_but_its_number(lengths, batch, seed, numbers):
    used = Order(np.array(lengths), batch, seed)
    for number in numbers:
        fresh = Order(np.array(lengths), batch, seed)
        assert used.batch(number).tolist() == fresh.batch(number).tolist()


@pytest.mark.parametrize("lengths", [np.arange(1, 201), np.arange(1000) % 37 + 1, np.ones(100, np.int64)])
def test_members_change_from_epoch_to_epoch_and_with_the_seed(lengths):
    order = Order(lengths, 4, seed=0)
    groups = [{frozenset(members) for members in epoch(order, number)} for number in range(3)]
    groups.append({frozenset(members) for members in epoch(Order(lengths, 4, seed=1), 0)})
    for i, one in enumerate(groups):
        for other in groups[i + 1 :]:
            assert len(one & other) < len(one) / 10


def test_micro_batches_are_of_nearly_one_length_and_come_in_no_order_of_length():
    lengths = np.random.default_rng(5).integers(10, 1000, 10_000)
    batches = epoch(Order(lengths, 8, seed=3), 0)
    padded = sum(len(members) * lengths[members].max() for members in batches)
    assert padded < 1.05 * lengths.sum()  # unsorted: 1.8
    longest = np.array([lengths[members].max() for members in batches])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.1


def test_the_order_never_changes():
    """Jobs that stopped under an earlier version continue: these numbers must stay."""
    order = Order(np.array([5, 3, 9, 1, 7, 7, 2, 8, 4, 6]), 2, seed=42)
    assert epoch(order, 0) == [[4, 7], [3, 0], [6, 1], [9, 5], [8, 2]]
    assert epoch(order, 1) == [[3, 9], [1, 0], [7, 2], [4, 5], [6, 8]]


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no order of 0 examples"):
        Order(np.array([], np.int64), 4, 0)


def test_collate_pads_on_the_right_to_the_longest():
    examples = [
        Example(np.array([5, 6, 7], np.int32), np.array([False, True, True])),
        Example(np.array([8], np.int32), np.array([True])),
    ]
    batch = collate(examples)
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0]] and batch.tokens.dtype == np.int64
    assert batch.mask.tolist() == [[False, True, True], [True, False, False]] and batch.mask.dtype == np.bool_
    assert batch.lengths.tolist() == [3, 1] and batch.lengths.dtype == np.int64
