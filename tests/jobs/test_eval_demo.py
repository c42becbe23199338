"""A real model on a real task: banking77, before and after it was tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import banking77
from jobs.scenarios import eval_job, run_job, tune_job


@pytest.mark.slow
@pytest.mark.model
def test_an_adapter_is_measured_against_its_base(tmp_path: Path) -> None:
    """In agreement with a plain run, whose lines are compared by hand."""
    train, test = banking77.write(tmp_path, train=60, test=30)
    tune_job(tmp_path, Path("demo"), data=train, name="eval-banking", rank=16, lr=5e-4, epochs=1, batch=4,
             grad_accum=1, numerics=None)  # fmt: skip
    models = ("demo", "demo+eval-banking")
    result, events = eval_job(
        tmp_path, *models, data=test, metric=("exact_match", "f1"), batch=64, numerics=None
    )
    assert result.run is not None
    assert sum(event["event"] == "row" for event in events) == 60
    report = json.loads((result.run.folder / "report.json").read_text())
    means = {(score["model"], score["metric"]): score["mean"] for score in report["scores"]}
    for model in models:
        ran, _ = run_job(tmp_path, Path(model), data=test, batch=64, numerics=None)
        assert ran.run is not None
        assert means[model, "exact_match"] == pytest.approx(banking77.accuracy(ran.run.results))
    (compared,) = [one for one in report["comparisons"] if one["metric"] == "exact_match"]
    assert compared["difference"] == pytest.approx(
        means[models[1], "exact_match"] - means["demo", "exact_match"]
    )
    assert compared["better"] - compared["worse"] == round(30 * compared["difference"])
    differing = (result.run.folder / "disagreements.jsonl").read_text().splitlines()
    assert len(differing) == report["disagreements"] >= compared["better"] + compared["worse"]
