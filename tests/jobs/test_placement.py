"""Jobs whose layers are streamed: the same bits, continued in either placement, killed at any point."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.scenarios import run_job, tune_job, write_prompts
from models.folders import tiny_llama
from spillover.engine.ring import Layout
from spillover.engine.torch import plan as planning
from spillover.engine.torch.fit import Streaming
from spillover.errors import InputError, ModelError
from spillover.jobs.checkpoint import KIND, read_checkpoint
from spillover.jobs.events import Events
from spillover.jobs.job import JobOptions
from spillover.state import State
from spillover.store import open_store

SPILL = Path(sys.executable).with_name("spill")


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory there is, no layer stays: every pass reads them all."""

    def smallest(streaming: Streaming, budget: int) -> Layout:
        return Layout.of(streaming.layers, streaming.drive, slots=1)

    monkeypatch.setattr(Streaming, "layout", smallest)


def losses(state: str) -> list[float]:
    document = State(open_store(state)).read()
    assert document is not None
    record, _ = read_checkpoint(State(open_store(state)).open(document.current[KIND]))
    return list(record.losses)


def results(file: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["message"]["content"]) for one in lines]


@pytest.mark.parametrize(
    "placements", [("streamed", "streamed"), ("resident", "streamed"), ("streamed", None)]
)
def test_a_tune_continues_in_either_placement(
    folder: Path, tiny: Path, reading: None, placements: tuple[str | None, str | None]
) -> None:
    whole, parts = str(folder / "whole"), str(folder / "parts")
    tune_job(folder, tiny, state=whole)
    first, second = placements
    tune_job(folder, tiny, state=parts, placement=first, stop_after=5)
    tune_job(folder, tiny, state=parts, placement=second)
    assert losses(parts) == losses(whole)


def test_a_run_continues_in_either_placement(folder: Path, tiny: Path, reading: None) -> None:
    run_job(folder, tiny, state=str(folder / "whole"), out=folder / "whole.jsonl")
    run_job(folder, tiny, state=str(folder / "parts"), placement="streamed", stop_after=5)
    run_job(folder, tiny, state=str(folder / "parts"), stop_after=3)
    run_job(folder, tiny, state=str(folder / "parts"), placement="streamed", out=folder / "parts.jsonl")
    assert results(folder / "parts.jsonl") == results(folder / "whole.jsonl")


@pytest.mark.parametrize("job", ["tune", "run"])
def test_a_weight_file_that_shrinks_is_a_durable_stop(
    folder: Path, reading: None, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """One line; what was done is kept, and with the file back the job goes on as if nothing had been."""
    model = tiny_llama(folder / "own")
    (weights,) = model.glob("*.safetensors")
    content, emit, counts = weights.read_bytes(), Events.emit, {"step": 0, "row": 0}
    perform: Any = tune_job if job == "tune" else run_job
    perform(folder, model, state=str(folder / "whole"))

    def shrinking(self: Events, kind: str, **fields: Any) -> None:
        emit(self, kind, **fields)
        if kind in counts:
            counts[kind] += 1
            if counts[kind] == 4:
                os.truncate(weights, len(content) // 2)

    with monkeypatch.context() as broken:
        broken.setattr(Events, "emit", shrinking)
        with pytest.raises(ModelError, match=r"own.*(layer|tensor|truncated)") as caught:
            perform(folder, model, state=str(folder / "parts"), placement="streamed")
    assert "\n" not in str(caught.value)
    document = State(open_store(str(folder / "parts"))).read()
    assert document is not None
    assert document.current["ckpt" if job == "tune" else "rows"].step >= 4
    weights.write_bytes(content)
    result, _ = perform(folder, model, state=str(folder / "parts"), placement="streamed")
    if job == "tune":
        assert losses(str(folder / "parts")) == losses(str(folder / "whole"))
    else:
        whole = run_job(folder, model, state=str(folder / "whole"))[0].run
        assert result.run is not None and whole is not None
        assert results(result.run.results) == results(whole.results)


def killed(folder: Path, command: list[str], kind: str, at: list[int]) -> None:
    """Start `command` again and again; kill -9 it once it has told so many events of `kind`."""
    environment = os.environ | {"SPILL_LEASE_SECONDS": "0.5"}
    for count in [*at, -1]:  # the last one is left alone
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        with process:
            for line in process.stdout:
                count -= json.loads(line)["event"] == kind
                if count == 0:
                    process.kill()
                    break
            error = process.stderr.read()
        assert process.returncode == (-9 if count == 0 else 0), error


@pytest.mark.slow
def test_kill_9_in_a_streamed_tune(folder: Path, tiny: Path) -> None:
    whole = str(folder / "whole")
    tune_job(folder, tiny, state=whole)
    command = [str(SPILL), "tune", str(tiny), "train.jsonl", "--name", "killed", "--rank", "4",
               "--lr", "1e-2", "--epochs", "3", "--batch", "2", "--grad-accum", "2",
               "--ckpt-every", "1", "--dropout", "0.1",
               "--numerics", "float32", "--headless", "--quiet", "--placement", "streamed",
               "--state", "killed"]  # fmt: skip
    killed(folder, command, "step", [2, 1, 4])
    assert losses(str(folder / "killed")) == losses(whole)


@pytest.mark.slow
def test_kill_9_in_a_streamed_run(folder: Path, tiny: Path) -> None:
    write_prompts(folder / "prompts.jsonl", rows=120)
    run_job(folder, tiny, state=str(folder / "whole"), out=folder / "whole.jsonl")
    command = [str(SPILL), "run", str(tiny), "prompts.jsonl", "--batch", "3", "--numerics", "float32",
               "--headless", "--quiet", "--placement", "streamed", "--state", "killed",
               "--out", "killed.jsonl"]  # fmt: skip
    killed(folder, command, "row", [7, 30, 2])
    assert results(folder / "killed.jsonl") == results(folder / "whole.jsonl")


@pytest.mark.parametrize("job", ["tune", "run"])
def test_a_dry_run_says_what_would_be_done_and_begins_nothing(folder: Path, tiny: Path, job: str) -> None:
    before = sorted(folder.rglob("*"))
    perform: Any = tune_job if job == "tune" else run_job
    result, events = perform(folder, tiny, state=str(folder / "s"), placement="streamed", dry_run=True)
    told = result.message.splitlines()
    assert told[0].startswith(f"{job} {tiny}") and "streamed on cpu" in told[0]
    assert any(line.startswith("memory, ") for line in told)
    assert "reads 0.00 GB from the drive" in told[-2]  # all layers have room
    assert told[-1] == "nothing was begun"
    assert {event["event"] for event in events} == {"stage"}
    made = {path.name for path in set(folder.rglob("*")) - set(before)}
    assert not made & {"s", "runs", "state"}


@pytest.mark.parametrize("job", ["tune", "run"])
def test_a_dry_run_of_finished_work_writes_nothing_either(folder: Path, tiny: Path, job: str) -> None:
    perform: Any = tune_job if job == "tune" else run_job
    perform(folder, tiny, state=str(folder / "s"))
    out = {"out": folder / "again.jsonl"} if job == "run" else {}
    shutil.rmtree(folder / "home" / "adapters", ignore_errors=True)
    result, _ = perform(folder, tiny, state=str(folder / "s"), dry_run=True, **out)
    assert result.message.endswith("nothing was begun")
    assert not (folder / "again.jsonl").exists() and not (folder / "home" / "adapters").exists()


def test_a_dry_run_counts_what_is_left(folder: Path, tiny: Path) -> None:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    run_job(folder, tiny, state=str(folder / "s"), stop_after=6)
    result, _ = run_job(folder, tiny, state=str(folder / "s"), dry_run=True)
    assert "12 rows" in result.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "much"}, "--memory 'much' is no size"),
        ({"placement": "disk"}, "--placement disk is unknown"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        JobOptions(**options)
    assert caught.value.hint


@pytest.mark.parametrize("job", ["tune", "run"])
def test_the_drive_is_measured_aloud(
    folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.setattr(planning, "_WORTH_MEASURING", 0)
    perform: Any = tune_job if job == "tune" else run_job
    _, events = perform(folder, tiny, placement="streamed", dry_run=True)
    told = [event["message"] for event in events if event.get("stage") == "drive"]
    assert told and all(re.fullmatch(r"measuring the drive: \d+ of 11 s", line) for line in told)
    _, events = perform(folder, tiny, placement="streamed", dry_run=True)
    assert [event for event in events if event.get("stage") == "drive"] == []
