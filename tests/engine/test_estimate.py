"""The arithmetic of estimates, with costs that are given."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from spillover.engine.calibrate import (
    COMPARED,
    FEW,
    LONG,
    MANY,
    PREFILL,
    ROWS,
    SEQUENCE,
    SHORT,
    Passes,
    Steps,
)
from spillover.engine.estimate import Costs, Generation, Limits, Shape, Speed, Traffic, Tuning, assumed

LIMITS = Limits(bandwidth=30e9, arithmetic=400e9, drive=2e9)
SHAPE = Shape(
    layers=30,
    hidden=576,
    queries=576,
    weights=106_000_000,
    stored=106_000_000,
    head=28_000_000,
    width=2,
    cache=23_040,
)
ONLY_PRODUCTS = Costs(((1, 1e-10), (16, 2e-10), (64, 8e-10)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
COSTS = Costs(
    ((1, 7e-11), (4, 7e-11), (16, 1e-10), (64, 3e-10), (256, 1.1e-9)), 2e-5, 1e-8, 6e-11, 2e-11, 0.0, 2e-10
)
TRAINING = Costs(((64, 8e-10), (256, 2.2e-9)), 2e-3, 3e-8, 0.0, 1e-10, 1.2e-11, 9e-10)


def test_products_cost_a_straight_line_between_what_was_measured():
    assert ONLY_PRODUCTS.product(0.5) == 1e-10
    assert ONLY_PRODUCTS.product(16) == 2e-10
    assert ONLY_PRODUCTS.product(40) == pytest.approx(5e-10)
    assert ONLY_PRODUCTS.product(640) == pytest.approx(8e-9)


def test_answers_take_prefills_and_a_step_for_each_further_token():
    speed = Speed(SHAPE, LIMITS, ONLY_PRODUCTS)
    found = speed.generation(Generation(rows=16, prompt=4, answer=11, batch=16, pass_tokens=64))
    # one prefill of 64 tokens with 16 rows of logits, ten steps of 16 rows
    prefill = SHAPE.weights * 8e-10 + SHAPE.head * 2e-10
    step = (SHAPE.weights + SHAPE.head) * 2e-10
    assert found.seconds == pytest.approx(prefill + 10 * step)
    assert found.tokens == 16 * 11
    assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
    assert not found.rough


def test_rows_that_are_scored_take_one_prefill_and_logits_of_what_is_scored():
    speed = Speed(SHAPE, LIMITS, ONLY_PRODUCTS)
    found = speed.generation(Generation(rows=16, prompt=4, answer=0, batch=16, pass_tokens=64, scored=1))
    assert found.seconds == pytest.approx(SHAPE.weights * 8e-10 + SHAPE.head * 2e-10)
    assert found.tokens == 16 and found.tokens_per_s > 0
    more = speed.generation(Generation(rows=16, prompt=4, answer=0, batch=16, pass_tokens=64, scored=3))
    assert more.seconds == pytest.approx(SHAPE.weights * 8e-10 + SHAPE.head * ONLY_PRODUCTS.product(48))
    assert more.tokens == 48


def test_rows_beyond_the_batch_come_after_the_others():
    speed = Speed(SHAPE, LIMITS, ONLY_PRODUCTS)
    one, three = (
        speed.generation(Generation(rows=rows, prompt=1, answer=101, batch=16, pass_tokens=1)).seconds
        for rows in (16, 40)
    )
    rest = (SHAPE.weights + SHAPE.head) * ONLY_PRODUCTS.product(8) * 100
    assert three == pytest.approx(2 * one + rest, rel=0.02)


def test_each_part_of_a_pass_costs():
    speed = Speed(SHAPE, LIMITS, COSTS)
    work = Generation(rows=16, prompt=100, answer=200, batch=16, pass_tokens=2048)
    whole = speed.generation(work).seconds
    for name, more in (("layer", 199 * 30 * 2e-5), ("attention", 199 * 16 * 30 * 576 * 200 * 6e-11)):
        without = dataclasses.replace(speed, costs=_without(COSTS, name))
        # the prefills' share of it comes on top
        assert whole - without.generation(work).seconds == pytest.approx(more, rel=0.02)
    for name in ("element", "causal", "start"):
        without = dataclasses.replace(speed, costs=_without(COSTS, name))
        assert without.generation(work).seconds < whole


def _without(costs, name):
    return msgspec.structs.replace(costs, **{name: 0.0})


def test_what_prompts_share_is_computed_once_in_whole_blocks():
    work = Generation(rows=10, prompt=100, answer=1, batch=10, pass_tokens=10_000, shared=70)
    apart = Speed(SHAPE, LIMITS, ONLY_PRODUCTS).generation(work)
    together = Speed(SHAPE, LIMITS, ONLY_PRODUCTS, block=32).generation(work)
    head = SHAPE.head * ONLY_PRODUCTS.product(10)
    # 64 of 70 shared tokens, for nine of ten rows
    assert (together.seconds - head) / (apart.seconds - head) == pytest.approx((1000 - 9 * 64) / 1000)


def test_steps_take_their_micro_batches_and_the_adapters_update():
    speed = Speed(SHAPE, LIMITS, TRAINING)
    work = Tuning(10, 20, sequences=2, length=64, targets=32, adapter=5_000_000, pass_tokens=1 << 20)
    layers = 30 * (2e-3 + 128 * 576 * (3e-8 + 32 * 1e-10))
    one = SHAPE.weights * TRAINING.product(128) + layers + 32 * SHAPE.head * 1.2e-11
    start, update = SHAPE.bytes * 9e-10, 60 * 5_000_000 / 30e9
    assert speed.tuning(work).seconds == pytest.approx(start + 20 * one + 10 * update)
    assert speed.tuning(work).tokens == 20 * 128
    again = dataclasses.replace(work, recompute=True)
    assert speed.tuning(again).seconds > 1.3 * speed.tuning(work).seconds
    apart = dataclasses.replace(work, pass_tokens=64)
    assert speed.tuning(apart).seconds > speed.tuning(work).seconds


def test_the_bound_is_what_takes_longest_alone():
    speed = Speed(SHAPE, LIMITS)
    assert speed.generation(Generation(1, 64, 64, 1, 2048)).bound == "memory bandwidth"
    assert speed.generation(Generation(64, 64, 64, 64, 2048)).bound == "arithmetic"
    assert speed.tuning(Tuning(1, 1, 4, 128, 256, 0, 1 << 20)).bound == "arithmetic"
    assert Traffic(bytes=30e9, flops=100e9, read=1e9).bound(LIMITS) == ("memory bandwidth", 1.0)
    assert Traffic(flops=100e9, read=1e9).bound(LIMITS) == ("drive", 0.5)
    assert Traffic(flops=100e9, read=1e9).bound(Limits(30e9, 400e9)) == ("arithmetic", 0.25)


def test_weights_from_the_drive_bound_every_pass():
    speed = Speed(SHAPE, LIMITS, COSTS, streamed=2_000_000_000)
    found = speed.generation(Generation(16, 64, 65, 16, 2048))
    assert (found.bound, found.seconds) == ("drive", pytest.approx(65.0))
    assert speed.tuning(Tuning(3, 3, 4, 128, 256, 0, 1 << 20)).seconds == pytest.approx(3.0)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_without_measured_costs_an_estimate_is_rough_and_of_the_right_size(rows):
    work = Generation(rows, 64, 64, rows, 2048)
    rough, exact = (Speed(SHAPE, LIMITS, costs).generation(work) for costs in (None, COSTS))
    assert (rough.rough, exact.rough) == (True, False)
    assert 0.5 < rough.seconds / exact.seconds < 2
    tune = Tuning(4, 4, 4, 128, 256, 5_000_000, 1 << 20)
    rough, exact = (Speed(SHAPE, LIMITS, costs).tuning(tune) for costs in (None, TRAINING))
    assert 0.4 < rough.seconds / exact.seconds < 2


def test_no_estimate_is_faster_than_the_machine():
    nothing = Costs(((1, 0.0), (2, 0.0)), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    found = Speed(SHAPE, LIMITS, nothing).generation(Generation(1, 1, 10, 1, 2048))
    assert found.seconds >= 10 * SHAPE.bytes / LIMITS.bandwidth


def test_assumed_costs_grow_with_the_tokens():
    for training in (False, True):
        tokens = list(assumed(LIMITS, 2, training=training).products)
        assert tokens == sorted(tokens)
        assert [seconds for _, seconds in tokens] == sorted(seconds for _, seconds in tokens)


LARGE = Shape(4, 1024, 1024, 45_000_000, 45_000_000, 8_400_000, 2, 4096)
SMALL = Shape(8, 128, 128, 1_200_000, 1_200_000, 65_536, 2, 2048)


def test_passes_of_two_models_give_the_costs_of_a_third():
    """Seconds that known costs would take are taken apart, and put together again for another shape."""

    def decode(shape, rows, length):
        beside = COSTS.layer + rows * (
            shape.hidden * COSTS.element + shape.queries * length * COSTS.attention
        )
        return (shape.weights + shape.head) * COSTS.product(rows) + shape.layers * beside

    def prefill(rows, length):
        tokens, seen = rows * length, length / 2 * COSTS.causal
        beside = COSTS.layer + tokens * (LARGE.hidden * COSTS.element + LARGE.queries * seen)
        products = LARGE.weights * COSTS.product(tokens) + LARGE.head * COSTS.product(rows)
        return products + LARGE.layers * beside

    passes = Passes(
        start=LARGE.bytes * COSTS.start,
        steps={rows: decode(LARGE, rows, SHORT) for rows in ROWS},
        long=decode(LARGE, COMPARED, LONG),
        prefill=prefill(PREFILL // SEQUENCE, SEQUENCE),
        whole=prefill(1, PREFILL),
        one=decode(SMALL, ROWS[0], SHORT)
        - SMALL.weights * COSTS.product(1),  # its products are in the caches
        most=decode(SMALL, ROWS[-1], SHORT),
    )
    found = passes.costs(LARGE, SMALL)
    assert found.attention == pytest.approx(COSTS.attention, rel=0.05)
    assert found.causal == pytest.approx(COSTS.causal, rel=0.4)
    assert found.element == pytest.approx(COSTS.element, rel=0.3)
    for rows in (1, 16, 64):
        work = Generation(rows, 64, 64, rows, 2048)
        again, given = (Speed(SHAPE, LIMITS, costs).generation(work).seconds for costs in (found, COSTS))
        assert again == pytest.approx(given, rel=0.1)


def test_training_steps_of_two_models_give_the_costs_of_a_third():
    def step(shape, sequences, length, targets):
        tokens = sequences * length
        beside = TRAINING.layer + tokens * (
            shape.hidden * TRAINING.element + shape.queries * length / 2 * TRAINING.causal
        )
        learning = sequences * (targets - 1) * shape.head * TRAINING.target
        return shape.weights * TRAINING.product(tokens) + shape.layers * beside + learning

    steps = Steps(
        start=LARGE.bytes * TRAINING.start,
        few=step(LARGE, FEW, SEQUENCE, 1),
        many=step(LARGE, MANY, SEQUENCE, 1),
        whole=step(LARGE, 1, MANY * SEQUENCE, 1),
        learning=step(LARGE, MANY, SEQUENCE, SEQUENCE - 1),
        small_few=step(SMALL, FEW, SEQUENCE, 1),
        small_many=step(SMALL, MANY, SEQUENCE, 1),
    )
    found = steps.costs(LARGE, SMALL)
    assert found.target == pytest.approx(TRAINING.target, rel=0.01)
    work = Tuning(4, 4, 4, 128, 256, 5_000_000, 1 << 20)
    again, given = (Speed(SHAPE, LIMITS, costs).tuning(work).seconds for costs in (found, TRAINING))
    assert again == pytest.approx(given, rel=0.1)


def test_a_hiccup_leaves_products_their_part():
    seconds = dict.fromkeys(ROWS, 0.01)
    found = Passes(0.1, seconds, long=0.005, prefill=0.1, whole=0.05, one=5.0, most=9.0).costs(LARGE, SMALL)
    assert all(product > 0 for _, product in found.products)
    assert found.attention == found.causal == 0.0
    trained = Steps(0.1, 0.1, 0.05, 0.01, 0.01, small_few=3.0, small_many=1.0).costs(LARGE, SMALL)
    assert all(product > 0 for _, product in trained.products)
    assert trained.target == trained.causal == trained.element == 0.0
