"""``spill doctor``: what this machine is and how fast."""

from __future__ import annotations

import json
import re
import shutil
import time
from functools import partial

import pytest
from typer.testing import CliRunner

from spillover import __version__
from spillover.cli.app import app
from spillover.engine.estimate import Costs
from spillover.engine.ring import Drive
from spillover.engine.speeds import Machine, Memory, Rates, keep, machine_key, processor
from spillover.engine.torch import measure as measuring


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home for commands that run in this process."""
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def figures(version=None, **changed):
    costs = Costs(((1, 1e-10), (64, 1e-9)), 1e-5, 1e-9, 1e-11, 1e-11, 0.0, 1e-10)
    facts = {
        "processor": processor(),
        "threads": 2,
        "torch": "2.13.0",
        "version": version or __version__,
        "time": time.time() - 7_300,
        "seconds": 22.0,
        "memory": Memory(31.5),
        "drive": Drive(rate=1.25e9, direct=True, source="1.1 GB written for it"),
        "without_drive": "",
        "rates": {"bf16": Rates(445.2, 480.0, 30.0, "torch", costs, costs)},
    }
    return Machine(**facts | changed)


def doctor(*words):
    return CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)


def test_doctor_shows_what_was_measured_and_when(home):
    assert doctor().stdout.splitlines()[-1] == "speeds    not measured yet; spill doctor --measure"
    keep(machine_key(2, "2.13.0"), figures())
    lines = doctor().stdout.splitlines()[-3:]
    assert lines[0] == (
        "reading   memory 31.5 GB/s, drive 1.25 GB/s past the page cache (1.1 GB written for it)"
    )
    assert lines[1].startswith("bf16      products 445 GFLOP/s, passes 480 GFLOP/s, ")
    assert lines[2].startswith("measured  2 hours ago in 22 s with 2 threads; ")
    cached = Drive(rate=8e8, source="model.safetensors")
    keep(machine_key(2, "2.13.0"), figures(drive=cached))
    assert doctor().stdout.splitlines()[-3].endswith("0.80 GB/s through the page cache (model.safetensors)")
    keep(machine_key(2, "2.13.0"), figures("0.0.1", drive=None, without_drive="no room"))
    lines = doctor().stdout.splitlines()[-3:]
    assert lines[0].endswith("drive not measured: no room")
    assert "by spillover 0.0.1: estimates need it again" in lines[2]


def test_doctor_speaks_json(home):
    facts = json.loads(doctor("--json").stdout)
    assert facts["measured"] is None and facts["home"] == str(home)
    assert facts["memory_bytes"] > 0 and facts["packages"]["torch"]
    keep(machine_key(2, "2.13.0"), figures())
    assert json.loads(doctor("--json").stdout)["measured"]["memory"] == {"gbs": 31.5}


def test_doctor_measures_and_says_when_that_cannot_be_kept(home, monkeypatch):
    """The real measurement, of models that take no time."""
    small = dict(measuring.SMALL, num_hidden_layers=2, vocab_size=512)
    for name, value in {
        "LARGE": small | {"hidden_size": 192},
        "SMALL": small,
        "_RUNS": 2,
        "_PRODUCT": 256,
    }.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "_MEMORY_BYTES", 1 << 24)
    monkeypatch.setattr(measuring, "sample", partial(measuring.sample, large=1 << 25))
    monkeypatch.setattr(measuring, "_DRIVE_SECONDS", 0.1)
    first = doctor("--measure")
    assert first.exit_code == 0 and first.stderr == ""
    assert re.search(r"^measured  just now in \d+ s with \d+ threads;", first.stdout, re.M)
    assert json.loads(doctor("--json").stdout)["measured"]["rates"].keys() == {"float32", "bf16"}
    shutil.rmtree(home)
    home.write_text("a file, where the folder would be")
    again = doctor("--measure", "--json")
    assert json.loads(again.stdout)["measured"]["memory"]["gbs"] > 0
    assert again.stderr == f"{home} cannot be written: nothing of this was kept\n"
