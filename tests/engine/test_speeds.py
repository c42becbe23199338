"""What was measured is kept, found again, and never in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spillover.engine import drive
from spillover.engine.drive import CannotMeasure, measure_drive
from spillover.engine.estimate import Costs
from spillover.engine.speeds import (
    Drive,
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

MIB = 1 << 20


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
        "drive": Drive(1.5, True, 10**9, "a file"),
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
    new = {machine_key(2, "2.13.0"): {"processor": "x", "flux": [1]}, "later": [1, 2, "three"]}
    (home / "speeds.json").write_text(json.dumps(old | new))
    assert recall(next(iter(old)), Speeds) == Speeds(422.6, True)
    assert recall(machine_key(2, "2.13.0"), Machine) is None
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


def test_a_large_model_file_is_read_as_it_is(home):
    folder = home / "models" / "one"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(40 * MIB))
    sparse = home / "models" / "two"
    sparse.mkdir()
    with (sparse / "sparse.safetensors").open("wb") as file:
        file.truncate(100 * MIB)
    found = measure_drive(large=32 * MIB, seconds=0.2)
    assert found.gbs > 0 and found.source == "model.safetensors" and found.bytes >= 16 * MIB
    assert {path.name for path in home.rglob("*")} == {
        *("models", "one", "two", "model.safetensors", "sparse.safetensors")
    }


def test_without_one_a_file_is_written_and_deleted(home):
    home.mkdir()
    found = measure_drive(large=32 * MIB, seconds=0.2)
    assert found.gbs > 0 and "written for it" in found.source
    assert [*home.iterdir()] == []


def test_where_the_page_cache_cannot_be_avoided_the_file_is_read_once(home, monkeypatch):
    home.mkdir()
    opened = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(drive.os, "open", refuse)
    found = measure_drive(large=64 * MIB, seconds=5.0)
    assert (found.direct, found.bytes) == (False, 64 * MIB)


def test_a_drive_that_is_full_or_refuses_is_not_measured(home, monkeypatch):
    home.mkdir()
    with pytest.raises(CannotMeasure, match=r"has no room for a file of \d+"):
        measure_drive(large=1 << 60)

    def refuse(**named):
        raise PermissionError(13, "Permission denied", named["dir"])

    monkeypatch.setattr(drive.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(CannotMeasure, match=f"{home}: Permission denied"):
        measure_drive(large=32 * MIB)


def test_a_drive_that_fails_is_not_measured(home, monkeypatch):
    home.mkdir()
    monkeypatch.setattr(drive.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CannotMeasure, match="Input/output error"):
        measure_drive(large=32 * MIB)
    assert not [*Path(home).iterdir()]
