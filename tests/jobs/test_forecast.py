"""The line before the work and the share of the bound, on a machine of known speeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.scenarios import run_job, tune_job
from spillover.engine.estimate import Costs
from spillover.engine.speeds import Machine, Memory, Rates, Speeds, keep, machine_key, processor
from spillover.engine.torch.bound import code_of
from spillover.engine.torch.native.library import library
from spillover.jobs import pace
from spillover.jobs.run import Extent

SECONDS = r"about [\d.]+ (s|min|h)"


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine, so that its bound is reached, with costs of exactly one second a layer and pass."""
    from spillover import __version__

    costs = Costs(((1, 0.0), (2, 0.0)), 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    code = code_of("compiled" if library() else "torch")
    rates = {name: Rates(1.0, 1.0, 1.0, code, costs, costs) for name in ("float32", "bf16")}
    threads, version = torch.get_num_threads(), str(torch.__version__)
    machine = Machine(processor(), threads, version, __version__, 1.0, 1.0, Memory(0.1), None, "", rates)
    assert keep(machine_key(threads, version), machine)
    monkeypatch.setattr(pace, "SHORTEST", 0.0)


def started(events: list[dict[str, Any]]) -> str:
    [message] = [event["message"] for event in events if event["event"] == "start"]
    return str(message)


def test_a_run_says_what_bounds_it_and_how_long_it_takes(measured, folder: Path, tiny: Path) -> None:
    _, events = run_job(folder, tiny, numerics="float32", stop_after=4)
    found = re.search(rf"; bound by memory bandwidth, {SECONDS} if every answer takes", started(events))
    assert found, started(events)
    rows = [event for event in events if event["event"] == "row"]
    assert rows[0]["bound"] == "memory bandwidth"
    assert all(row["share"] > 0 for row in rows)
    _, events = run_job(folder, tiny, numerics="float32")
    assert "rows/s" in started(events)


def test_what_is_done_is_not_estimated_again(measured, folder: Path, tiny: Path) -> None:
    def seconds(**changes: Any) -> float:
        _, events = tune_job(folder, tiny, numerics="float32", **changes)
        found = re.search(r"bound by \S.*?, about ([\d.]+) (s|min)", started(events))
        assert found, started(events)
        return float(found[1]) * (60 if found[2] == "min" else 1)

    whole, half = seconds(stop_after=6), seconds()
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_a_step_says_the_share_that_it_reached(measured, folder: Path, tiny: Path) -> None:
    _, events = tune_job(folder, tiny, numerics="float32")
    steps = [event for event in events if event["event"] == "step"]
    assert {step["bound"] for step in steps} <= {"memory bandwidth", "arithmetic"}
    assert all(step["share"] > 0 for step in steps)


def test_nothing_is_said_of_a_machine_that_nobody_measured(folder: Path, tiny: Path) -> None:
    for job in (run_job, tune_job):
        _, events = job(folder, tiny, numerics="float32")
        assert "bound by" not in started(events)
        work = [event for event in events if event["event"] in ("row", "step")]
        assert all(event["bound"] is event["share"] is None for event in work)


def test_an_estimate_without_measured_costs_is_marked(folder: Path, tiny: Path) -> None:
    threads, version = torch.get_num_threads(), torch.__version__
    keep(f"{processor()}, {threads} threads, torch {version}, torch.float32", Speeds(100.0, True))
    keep(f"{processor()}, {threads} threads, memory", Memory(30.0))
    _, events = run_job(folder, tiny, numerics="float32")
    assert re.search(r"bound by .*, roughly .*spill doctor --measure makes that exact", started(events))


def test_rows_are_summed_up_for_the_estimate() -> None:
    extent = Extent()
    for prompt, answer in (([1, 2, 3, 4], 5), ([1, 2, 3], 9), ([1, 2, 7, 8, 9], 1)):
        extent.add(prompt, answer)
    assert (extent.rows, extent.prompts, extent.answers, extent.longest) == (3, 12, 15, 12)
    assert extent.shared == [1, 2]
