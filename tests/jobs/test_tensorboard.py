"""TensorBoard's own reader sees each step of a tune once, whoever was killed where."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from faults import Zygote
from jobs.scenarios import tune_job, write_training
from spillover.jobs.events import Event
from spillover.jobs.interrupts import Ending
from spillover.jobs.tensorboard import PREFIX, EventFile

TAGS = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm"}
STEPS, VALIDATED = [*range(1, 9)], [4, 8]


def curves(*folders: Path) -> dict[str, list[tuple[int, float]]]:
    """What the reader has of the event files in the folders together: tag to steps and values."""
    together = folders[0]
    if len(folders) > 1:
        together = folders[0].parent / "together"
        shutil.rmtree(together, ignore_errors=True)
        together.mkdir()
        for folder in folders:
            for file in folder.glob(f"{PREFIX}*"):
                shutil.copy(file, together)
    reader = EventAccumulator(str(together), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def single(value: float) -> float:
    """As float32, which the files have."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def wanted(events: list[Event]) -> dict[str, list[tuple[int, float]]]:
    """What the events of an uninterrupted tune say, without its speed."""
    steps = [event for event in events if event["event"] == "step"]
    found = {tag: [(e["step"], single(e[name])) for e in steps] for tag, name in TAGS.items()}
    validations = [event for event in events if event.get("stage") == "validation"]
    return found | {"val/loss": [(event["step"], single(event["loss"])) for event in validations]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, list[tuple[int, float]]]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(folder / "home"))
        write_training(folder / "train.jsonl")
        write_training(folder / "val.jsonl", 3)
        result, events = tune_job(folder, tiny, steps=8, epochs=None, ckpt_every=2, val=folder / "val.jsonl")
    assert result.ending is Ending.DONE and result.run is not None
    found, expected = curves(result.run.folder), wanted(events)
    assert [step for step, _ in found.pop("train/tokens_per_s")] == STEPS
    assert found == expected
    assert [step for step, _ in expected["val/loss"]] == VALIDATED
    return expected


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("OMP_NUM_THREADS", "1")
        with Zygote("jobs.scenarios:drawn_scenario") as zygote:
            yield zygote


def a_run(folder: Path) -> Path:
    [run] = folder.glob("tune-*")
    return run


def prepared(folder: Path) -> Path:
    write_training(folder / "train.jsonl")
    write_training(folder / "val.jsonl", 3)
    return folder


WRITES = 1 + len(STEPS) + len(VALIDATED)
DEATHS = [(n, ("before", "half", "after")[n % 3]) for n in range(1, WRITES + 1)]


def test_killed_at_any_write_each_step_is_seen_once(memory: Path, tiny: Path, whole, zygote) -> None:
    prepared(memory)
    for dies in DEATHS:
        name = f"{dies[0]}-{dies[1]}"
        options = {"folder": str(memory), "model": str(tiny), "runs": f"{name}/runs"}
        died = zygote.run(str(memory / name / "state"), memory / f"{name}.log", dies=dies, **options)
        assert died.code == -9, died
        final = zygote.run(str(memory / name / "state"), memory / f"{name}.log", **options)
        assert final.code == 0, final
        found = curves(a_run(memory / name / "runs"))
        assert [step for step, _ in found.pop("train/tokens_per_s")] == STEPS, dies
        assert found == whole, dies


@pytest.mark.parametrize("dies", [(6, "after"), (7, "half"), (8, "before")])
def test_continued_on_another_machine(memory: Path, tiny: Path, whole, zygote, dies) -> None:
    """The one that died has its own folder, as has the one that continues; then somebody joins the two."""
    prepared(memory)
    for number, died in enumerate((dies, None)):
        options = {"folder": str(memory), "model": str(tiny), "runs": f"{number}/runs", "dies": died}
        assert zygote.run(str(memory / "state"), memory / "log", **options).code == (-9 if died else 0)
    here, there = a_run(memory / "0/runs"), a_run(memory / "1/runs")
    assert {there.parent.parent.name} == {"1"}
    alone = curves(there)
    for tag, points in whole.items():
        assert alone[tag] == [point for point in points if point[0] >= alone[tag][0][0]]
        assert alone[tag][0][0] <= 5
    joined = curves(here, there)
    for tag in ("train/loss", "train/lr", "val/loss"):
        assert joined[tag] == whole[tag], tag
    norms = joined["train/grad_norm"]  # of a step that is drawn anew, only the folder knows the norm
    missing = [point for point in whole["train/grad_norm"] if point not in norms]
    assert missing in ([], whole["train/grad_norm"][3:4])


def test_a_full_disk_is_told_once_and_the_steps_before_and_after_are_there(
    folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, count = os.pwrite, 0

    def full(file: int, data: bytes, at: int) -> int:
        nonlocal count
        count += 1
        if count == 4:
            return written(file, data[:9], at)
        if count in (5, 6):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    result, events = tune_job(folder, tiny, steps=8, epochs=None)
    assert result.ending is Ending.DONE and result.run is not None
    [told] = [event["message"] for event in events if event.get("stage") == "tensorboard"]
    where = result.run.folder
    assert told == f"TensorBoard will miss steps: {where}: no space left on the device; the work goes on"
    assert [step for step, _ in curves(result.run.folder)["train/loss"]] == [1, 2, 6, 7, 8]


def test_a_folder_that_cannot_be_written_at_first(folder: Path) -> None:
    runs = folder / "run"
    curve = EventFile(runs, 3)
    assert str(runs) in (curve.complaint() or "")
    curve.record({"event": "step", "step": 3, "time": 1.5, "loss": 2.0})
    assert curve.complaint() is None
    runs.mkdir()
    curve.record({"event": "step", "step": 4, "time": 2.5, "loss": math.nan, "lr": 1e300})
    curve.record({"event": "row", "step": 5})
    curve.close()
    found = curves(runs)
    assert found["train/lr"] == [(4, math.inf)]
    assert math.isnan(found["train/loss"][0][1])


def test_a_newer_file_sorts_last_whatever_the_clock_says(tmp_path: Path) -> None:
    ahead = tmp_path / f"{PREFIX}9000000000.elsewhere.1"
    ahead.touch()
    for step in (1, 2):
        curve = EventFile(tmp_path, step)
        curve.scalars(step, 0.0, {"a": float(step)})
        curve.close()
    assert len([*tmp_path.iterdir()]) == 3
    assert curves(tmp_path) == {"a": [(1, 1.0), (2, 2.0)]}
    curve = EventFile(tmp_path, 1)
    curve.close()
    assert curves(tmp_path) == {"a": []}


def test_lines_that_are_no_events_stop_nothing(folder: Path, tiny: Path) -> None:
    first, _ = tune_job(folder, tiny, steps=4, epochs=None, val=folder / "train.jsonl", stop_after=2)
    assert first.run is not None
    with (first.run.folder / "events.jsonl").open("a") as file:
        file.write('5\n{"a": 1}\n{"event": "step", "step": 2, "grad_norm": "<b>"}\n{"event": "st')
    second, _ = tune_job(folder, tiny, steps=4, epochs=None, val=folder / "train.jsonl")
    assert second.ending is Ending.DONE
    lines = (first.run.folder / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["event"] == "start"
    assert [step for step, _ in curves(first.run.folder)["train/loss"]] == [1, 2, 3, 4]
