"""Steps and learning rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.errors import InputError
from spillover.jobs.schedule import Steps, lr_at, warmup_steps


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 40))
def test_the_steps_cover_every_micro_batch_once_and_in_order(per_epoch, grad_accum, quarters):
    steps = Steps.of(per_epoch, epochs=quarters / 4, grad_accum=grad_accum)
    assert steps.micro_batches == math.ceil(quarters * per_epoch / 4)
    covered = [m for step in range(steps.total) for m in steps.micro_batches_of(step)]
    assert covered == list(range(steps.micro_batches))
    sizes = [len(steps.micro_batches_of(step)) for step in range(steps.total)]
    assert sizes[:-1] == [grad_accum] * (steps.total - 1) and 1 <= sizes[-1] <= grad_accum


@pytest.mark.parametrize(
    ("per_epoch", "epochs", "micro_batches"),
    [(50, 1.1, 55), (10, 1.5, 15), (7, 1.5, 11), (10, 0.01, 1), (3, 2, 6)],
)
def test_fractions_of_an_epoch(per_epoch, epochs, micro_batches):
    assert Steps.of(per_epoch, epochs=epochs).micro_batches == micro_batches


def test_a_number_of_steps_may_end_inside_any_epoch():
    steps = Steps.of(5, steps=7, grad_accum=2)
    assert (steps.total, steps.micro_batches) == (7, 14)
    assert steps.micro_batches_of(2) == range(4, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "--epochs must be above 0, not 0"),
        ({"epochs": float("nan")}, "--epochs must be above 0, not nan"),
        ({"epochs": float("inf")}, "--epochs must be above 0, not inf"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"steps": 1, "grad_accum": 0}, "--grad-accum must be at least 1, not 0"),
        ({"steps": 1, "epochs": 1}, "give either --epochs or --steps"),
        ({}, "give either --epochs or --steps"),
    ],
)
def test_numbers_that_make_no_steps(given, message):
    with pytest.raises(InputError) as caught:
        Steps.of(10, **given)
    assert str(caught.value) == message


def test_warm_up_is_rounded_up_from_the_decimal_that_was_typed():
    assert [warmup_steps(100, warmup) for warmup in (0, 0.03, 0.07, 0.001, 1)] == [0, 3, 7, 1, 100]


def test_cosine_as_written_out():
    rates = [lr_at(step, 12, 2e-4, 0.25, "cosine") for step in range(13)]
    assert rates[:3] == [0.0, pytest.approx(2e-4 / 3), pytest.approx(4e-4 / 3)]
    for step in range(3, 13):
        assert rates[step] == pytest.approx(1e-4 * (1 + math.cos(math.pi * (step - 3) / 9)), abs=1e-18)
    assert rates[12] == 0.0


def test_linear_and_constant_as_written_out():
    assert [lr_at(step, 4, 1.0, 0.0, "linear") for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [lr_at(step, 4, 1.0, 0.5, "constant") for step in range(5)] == [0.0, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (10, 0), (50, 0.03), (97, 0.1), (20, 1)])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rates_are_those_of_transformers(schedule, total, warmup):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, warmup_steps(total, warmup), total)
    for step in range(total):
        assert lr_at(step, total, 3e-4, warmup, schedule) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12
        )
        optimizer.step()
        theirs.step()
