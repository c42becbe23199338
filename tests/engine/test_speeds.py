"""What was measured is kept, found again, and never in the way."""

from __future__ import annotations

import json

import msgspec
import pytest

from spillover.engine.estimate import Costs
from spillover.engine.ring import Drive
from spillover.engine.speeds import (
    Machine,
    Memory,
    Rates,
    Speeds,
    keep,
    machine_key,
    machines,
    processor,
    recall,
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def machine(time=1.0, **changed):
    costs = Costs(((1, 1e-10), (64, 1e-9)), 1e-5, 1e-9, 1e-11, 1e-11, 0.0, 1e-10)
    rates = Rates(200.0, 180.0, 30.0, "torch", costs, costs)
    facts = {
        "processor": processor(),
        "threads": 2,
        "torch": "2.13.0",
        "version": "0.1.0",
        "time": time,
        "seconds": 20.0,
        "memory": Memory(30.0),
        "drive": Drive(rate=1.5e9, direct=True, source="a file"),
        "without_drive": "",
        "rates": {"float32": rates},
    }
    return Machine(**facts | changed)


def test_what_is_kept_is_found_again():
    assert machines() == []
    assert keep("a key", Speeds(100.0, True))
    assert keep(machine_key(2, "2.13.0"), machine(1.0))
    assert keep(machine_key(4, "2.13.0"), machine(2.0, threads=4))
    assert recall("a key", Speeds) == Speeds(100.0, True)
    assert recall(machine_key(2, "2.13.0"), Machine) == machine(1.0)
    assert [one.threads for one in machines()] == [4, 2]
    assert recall("another key", Speeds) is None


def test_entries_of_another_version_are_kept_and_not_believed(home):
    home.mkdir()
    old = {f"{processor()}, 2 threads, torch 2.13.0, torch.bfloat16": {"gflops": 422.6, "packed": True}}
    drive = {"gbs": 1.5, "direct": True, "bytes": 10**9, "source": "a file"}
    earlier = json.loads(msgspec.json.encode(machine())) | {"drive": drive}
    new = {machine_key(2, "2.13.0"): {"processor": "x", "flux": [1]}, "later": [1, 2, "three"]}
    new[machine_key(3, "2.13.0")] = earlier
    (home / "speeds.json").write_text(json.dumps(old | new))
    assert recall(next(iter(old)), Speeds) == Speeds(422.6, True)
    assert recall(machine_key(2, "2.13.0"), Machine) is recall(machine_key(3, "2.13.0"), Machine) is None
    assert recall("later", Speeds) is None
    assert machines() == []
    assert keep("a key", Memory(1.0))
    assert json.loads((home / "speeds.json").read_text()) == old | new | {"a key": {"gbs": 1.0}}


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": ', "\0"])
def test_a_damaged_file_is_written_anew(home, content):
    home.mkdir()
    (home / "speeds.json").write_text(content)
    assert recall("a key", Memory) is None
    assert keep("a key", Memory(1.0))
    assert recall("a key", Memory) == Memory(1.0)


def test_a_home_that_cannot_be_written_is_no_error(home):
    home.write_text("a file, where the folder would be")
    assert not keep("a key", Memory(1.0))
    assert recall("a key", Memory) is None
    assert home.is_file()
