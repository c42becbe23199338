"""Tuning: the same work whatever interrupts it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jobs.scenarios import tune_job, write_training
from spillover.errors import Corrupt, InputError, Mismatch, ModelError
from spillover.jobs.events import Event
from spillover.jobs.interrupts import Ending
from spillover.models.adapters import load
from spillover.state import State
from spillover.store import open_store

STEPS = 12


def course(events: list[Event]) -> list[tuple[int, list[int], float, float, float]]:
    """What each step did: its number, example rows, loss, gradient norm and learning rate."""
    return [
        (e["step"], e["rows"], e["loss"], e["grad_norm"], e["lr"]) for e in events if e["event"] == "step"
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Path):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILL_HOME", str(folder / "home"))
        write_training(folder / "train.jsonl")
        result, events = tune_job(folder, tiny)
        assert result.ending is Ending.DONE
        return course(events), load("tiny").tensors


def test_every_example_is_seen_once_an_epoch(whole) -> None:
    steps, _ = whole
    assert [step for step, *_ in steps] == [*range(1, STEPS + 1)]
    for epoch in range(3):
        seen = [row for _, rows, *_ in steps[4 * epoch : 4 * epoch + 4] for row in rows]
        assert sorted(seen) == [*range(16)]
    assert all(np.float32(loss) == loss or loss > 0 for _, _, loss, _, _ in steps)


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopped_at_any_step_it_continues_exactly(folder: Path, tiny: Path, whole, stop: int) -> None:
    steps, tensors = whole
    first, before = tune_job(folder, tiny, stop_after=stop)
    assert first.ending is Ending.STOPPED
    second, after = tune_job(folder, tiny)
    assert second.ending is Ending.DONE
    assert course(before) + course(after) == steps
    assert [e["step"] for e in after if e["event"] == "restore"] == [stop]
    assert all(np.array_equal(load("tiny").tensors[name], tensors[name]) for name in tensors)


def test_one_step_at_a_time_is_the_same_too(folder: Path, tiny: Path, whole) -> None:
    steps, _ = whole
    seen = []
    for _ in range(STEPS):
        _, events = tune_job(folder, tiny, stop_after=1)
        seen += course(events)
    assert seen == steps
    result, events = tune_job(folder, tiny)
    assert result.ending is Ending.DONE
    assert course(events) == []


def test_a_finished_run_is_not_done_again_but_its_adapter_is_put_back(folder: Path, tiny: Path) -> None:
    tune_job(folder, tiny, steps=2, epochs=None)
    wanted = load("tiny").tensors
    for file in (folder / "home/adapters/tiny").iterdir():
        file.unlink()
    (folder / "home/adapters/tiny").rmdir()
    result, events = tune_job(folder, tiny, steps=2, epochs=None, overwrite=False)
    assert "already complete" in result.message
    assert course(events) == []
    assert all(np.array_equal(load("tiny").tensors[name], wanted[name]) for name in wanted)
    result, _ = tune_job(folder, tiny, steps=2, epochs=None, overwrite=False)
    assert "installed" not in result.message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 2e-2}, "learning rate was 0.01, now 0.02"),
        ({"schedule": "linear"}, "schedule"),
        ({"batch": 4}, "steps|batch"),
        ({"grad_accum": 1}, "steps|grad accum"),
        ({"max_seq": 64}, "max seq"),
        ({"rank": 8}, "rank was 4, now 8"),
        ({"alpha": 8.0}, "alpha"),
        ({"targets": "q_proj"}, "targets"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"epochs": 2}, "steps was 12, now 8"),
        ({"dropout": 0.2}, "dropout"),
        ({"weight_decay": 0.0}, "weight decay"),
    ],
)
def test_other_work_is_refused_by_name_and_every_byte_stays(
    folder: Path, tiny: Path, change: dict, named: str
) -> None:
    state = str(folder / "state")
    tune_job(folder, tiny, state=state, stop_after=1)
    before = tree(folder)
    with pytest.raises(Mismatch, match=named):
        tune_job(folder, tiny, state=state, **change)
    assert tree(folder) == before


def test_other_data_and_other_weights_are_refused(folder: Path, tiny: Path) -> None:
    from models.folders import tiny_llama

    state = str(folder / "state")
    tune_job(folder, tiny, state=state, stop_after=1)
    other = tiny_llama(folder / "other", num_hidden_layers=1)
    with pytest.raises(Mismatch, match="weights was"):
        tune_job(folder, other, state=state)
    write_training(folder / "train.jsonl", 17)
    with pytest.raises(Mismatch, match="data was"):
        tune_job(folder, tiny, state=state, steps=STEPS, epochs=None)


def test_a_checkpoint_holds_what_the_format_says(folder: Path, tiny: Path) -> None:
    state = folder / "state"
    tune_job(folder, tiny, state=str(state), stop_after=4)
    document = State(open_store(state)).read()
    assert document is not None
    checkpoint = state / document.current["ckpt"].folder
    assert checkpoint.name.startswith("step-000000004-g000001-")
    params = load_file(checkpoint / "params.safetensors")
    opt = load_file(checkpoint / "opt.safetensors")
    assert params["layers.0.self_attn.q_proj.lora_a"].shape == (32, 4)
    assert params["layers.1.mlp.down_proj.lora_b"].shape == (4, 32)
    assert {array.dtype for array in (*params.values(), *opt.values())} == {np.dtype(np.float32)}
    assert opt.keys() == {f"{moment}::{name}" for name in params for moment in "mv"}
    record = json.loads((checkpoint / "state.json").read_text())
    assert (record["step"], len(record["losses"]), record["cursor"]) == (4, 4, {"micro_batch": 8})
    assert record["history"][0]["start"] == 0
    assert record["history"][0]["stop"] == 4
    assert record["history"][0]["numerics"] == "float32"


def test_history_says_what_computed_which_steps(folder: Path, tiny: Path) -> None:
    state = str(folder / "state")
    for numerics in ("float32", "bf16", "bf16", "float32"):
        tune_job(folder, tiny, state=state, numerics=numerics, stop_after=2)
    document = State(open_store(state)).read()
    assert document is not None
    record = json.loads((Path(state) / document.current["ckpt"].folder / "state.json").read_text())
    assert [(r["start"], r["stop"], r["numerics"]) for r in record["history"]] == [
        (0, 2, "float32"),
        (2, 6, "bf16"),
        (6, 8, "float32"),
    ]


def test_a_damaged_checkpoint_is_named_and_left_only_when_asked(folder: Path, tiny: Path, whole) -> None:
    steps, _ = whole
    state = folder / "state"
    tune_job(folder, tiny, state=str(state), stop_after=5)
    document = State(open_store(state)).read()
    assert document is not None
    damaged = state / document.current["ckpt"].folder / "params.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(Corrupt, match=r"params\.safetensors does not match its checksum"):
        tune_job(folder, tiny, state=str(state))
    _, events = tune_job(folder, tiny, state=str(state), from_previous=True)
    said = [e["message"] for e in events if e["event"] == "stage"]
    assert "steps 4 to 5 are given up and computed again" in said
    assert course(events) == steps[3:]


def test_validation_loss_is_measured_once_an_epoch_through_interruptions(folder: Path, tiny: Path) -> None:
    write_training(folder / "val.jsonl", 5)
    val = folder / "val.jsonl"
    _, events = tune_job(folder, tiny, val=val)
    wanted = [(e["step"], e["loss"]) for e in events if e.get("stage") == "validation"]
    assert [step for step, _ in wanted] == [4, 8, 12]
    assert [(step, loss) for step, loss in record_of(folder)["validation"]] == wanted
    seen: list[tuple[int, float]] = []
    state = str(folder / "state")
    for _ in range(STEPS + 1):
        _, events = tune_job(folder, tiny, val=val, state=state, stop_after=1)
        seen += [(e["step"], e["loss"]) for e in events if e.get("stage") == "validation"]
    assert sorted(set(seen)) == wanted


def test_what_cannot_work_is_refused_before_anything_is_written(folder: Path, tiny: Path) -> None:
    before = tree(folder)
    with pytest.raises(InputError, match="--lr"):
        tune_job(folder, tiny, lr=-1)
    with pytest.raises(ModelError, match="'gate'"):
        tune_job(folder, tiny, targets="gate")
    with pytest.raises(InputError, match="is no adapter name"):
        tune_job(folder, tiny, name="../x")
    with pytest.raises(InputError, match="--epochs or --steps"):
        tune_job(folder, tiny, steps=3)
    assert tree(folder) == before


def test_an_adapter_of_the_same_name_is_not_overwritten_unasked(folder: Path, tiny: Path) -> None:
    tune_job(folder, tiny, steps=1, epochs=None)
    before = tree(folder)
    with pytest.raises(InputError, match="exists already"):
        tune_job(folder, tiny, steps=2, epochs=None, overwrite=False)
    assert tree(folder) == before


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".hash" not in path.name and path.name != "speeds.json"
    }


def record_of(folder: Path) -> dict:
    """``state.json`` of the only run's current checkpoint."""
    [state] = folder.glob("runs/*/state")
    document = State(open_store(state)).read()
    assert document is not None
    return json.loads((state / document.current["ckpt"].folder / "state.json").read_text())


def test_a_lease_that_is_no_number_is_one_line(folder: Path, tiny: Path, monkeypatch) -> None:
    monkeypatch.setenv("SPILL_LEASE_SECONDS", "soon")
    with pytest.raises(InputError, match="SPILL_LEASE_SECONDS is 'soon'"):
        tune_job(folder, tiny)
