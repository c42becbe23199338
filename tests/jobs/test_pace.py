"""What a job says before and while it works about how fast it is."""

from __future__ import annotations

import pytest

from spillover.engine.estimate import Estimate, Limits, Shape, Speed, Traffic
from spillover.jobs import pace
from spillover.jobs.pace import Share, forecast

SPEED = Speed(Shape(1, 1, 1, 1, 1, 1, 2, 1), Limits(bandwidth=10e9, arithmetic=100e9))


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_a_share_is_of_what_was_done_since(clock):
    share = Share(SPEED)
    clock[0] = 102.0
    assert share.of(Traffic(bytes=10e9, flops=10e9)) == {"bound": "memory bandwidth", "share": 0.5}
    clock[0] = 104.0
    assert share.of(Traffic(bytes=10e9, flops=310e9)) == {"bound": "arithmetic", "share": 0.775}


def test_a_share_forgets_what_is_long_ago(clock):
    share, done = Share(SPEED), Traffic()
    for second in range(1, 121):  # twice as fast in the second minute
        clock[0] = 100.0 + second
        done += Traffic(bytes=4e9 if second <= 60 else 8e9)
        told = share.of(done)
        if second == 60:
            assert told["share"] == 0.4
    assert told["share"] == 0.8


def test_there_is_no_share_at_first_or_of_an_unknown_machine(clock):
    nothing = {"bound": None, "share": None}
    share = Share(SPEED)
    clock[0] = 100.1
    assert share.of(Traffic(bytes=1e9)) == nothing
    clock[0] = 200.0
    assert Share(None).of(Traffic(bytes=1e9)) == nothing


def test_a_forecast_says_what_bounds_and_how_long():
    sure = Estimate(80.0, 16_000, "memory bandwidth", rough=False)
    assert (
        forecast(sure, 250, "rows", " if it rains")
        == "bound by memory bandwidth, about 80 s if it rains (3.1 rows/s, 200 tokens/s)"
    )
    rough = Estimate(7_200.0, 7_200_000, "arithmetic", rough=True)
    said = (
        "bound by arithmetic, roughly 2 h (20 steps/s, 1,000 tokens/s; "
        "spill doctor --measure makes that exact)"
    )
    assert forecast(rough, 144_000, "steps") == said
    assert "about 2.5 min" in forecast(Estimate(150.0, 1, "drive", rough=False), 1, "rows")
    assert "about 0.25 s" in forecast(Estimate(0.25, 1, "drive", rough=False), 1, "rows")
