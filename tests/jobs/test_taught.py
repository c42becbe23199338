"""``tune --loss kl``: a student that learns what its teacher held likely, not only what it said."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import shared
from jobs.scenarios import distill_job, tune_job
from spillover.errors import InputError, Mismatch
from spillover.jobs.distill import DistillSettings
from spillover.jobs.events import Events
from spillover.jobs.job import JobOptions
from spillover.jobs.run import run_rows
from spillover.jobs.runs import JobFile
from spillover.jobs.tune import TuneSettings, tune
from spillover.models import resolve

KL: dict[str, Any] = {"loss": "kl", "name": "student", "steps": 4, "epochs": None}


def losses(events: list[Any]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def taught(folder: Path, tiny: Path) -> Path:
    """What the tiny model says, sampled, with five likely tokens a place."""
    distill_job(folder, tiny, out=folder / "taught.jsonl", logprobs=5, temperature=1.0, max_tokens=6)
    return folder / "taught.jsonl"


def test_a_model_has_nothing_to_learn_from_itself(folder: Path, tiny: Path, taught: Path) -> None:
    """The first step's loss is a divergence from an untrained student: zero; that of the text is not."""
    _, events = tune_job(folder, tiny, data=taught, dropout=0.0, **KL)
    assert abs(losses(events)[0]) < 1e-4
    _, events = tune_job(folder, tiny, data=taught, dropout=0.0, **KL | {"loss": "text", "name": "reader"})
    assert losses(events)[0] > 1


def test_the_first_loss_is_the_divergence_from_what_the_rows_say(
    folder: Path, tiny: Path, taught: Path
) -> None:
    """Of a teacher that holds the same tokens equally likely, computed from the student's own numbers."""
    lines = rows(taught)
    own = [zip(line["logprobs"]["top"], line["logprobs"]["top_token_ids"], strict=True) for line in lines]
    want, count = 0.0, 0
    p = 0.15
    for place in (place for line in own for place in line):
        q = [math.exp(value) for value in place[0]]
        rest_p, rest_q = 1 - 5 * p, 1 - sum(q)
        want += sum(p * math.log(p / one) for one in q) + rest_p * math.log(rest_p / rest_q)
        count += 1
    for line in lines:
        line["logprobs"]["top"] = [[math.log(p)] * 5 for _ in line["logprobs"]["top"]]
    write(taught, lines)
    settings = KL | {"steps": 1, "batch": len(lines), "grad_accum": 1}
    _, events = tune_job(folder, tiny, data=taught, dropout=0.0, **settings)
    assert losses(events)[0] == pytest.approx(want / count, rel=1e-4)
    assert [event["tokens"] for event in events if event["event"] == "step"] == [count]


def test_a_tune_that_is_stopped_after_each_step_has_the_same_losses(
    folder: Path, tiny: Path, taught: Path
) -> None:
    state = str(folder / "whole")
    _, whole = tune_job(folder, tiny, data=taught, state=state, **KL)
    found: list[float] = []
    for _ in range(4):
        _, events = tune_job(folder, tiny, data=taught, state=str(folder / "parts"), stop_after=1, **KL)
        found += losses(events)
    assert found == losses(whole)


def test_the_loss_is_part_of_what_a_tune_is(folder: Path, tiny: Path, taught: Path) -> None:
    state = str(folder / "state")
    tune_job(folder, tiny, data=taught, state=state, stop_after=1, **KL)
    with pytest.raises(Mismatch, match="loss"):
        tune_job(folder, tiny, data=taught, state=state, **KL | {"loss": "text"})


def test_a_reply_that_was_cut_does_not_teach_where_it_ends(folder: Path, tiny: Path, taught: Path) -> None:
    lines = rows(taught)
    cut = sum(line["finish_reason"] == "length" for line in lines)
    assert cut
    said = {**KL, "loss": "text", "steps": 1, "batch": len(lines), "grad_accum": 1}
    _, events = tune_job(folder, tiny, data=taught, **said)
    note = f"{cut} completions were cut at their limit: where they end is not learned"
    assert any(note in event.get("message", "") for event in events)
    for line in lines:
        line["finish_reason"] = "stop"
    _, whole = tune_job(folder, tiny, data=write(folder / "whole.jsonl", lines), **said | {"name": "other"})
    tokens = [[e["tokens"] for e in found if e["event"] == "step"] for found in (events, whole)]
    assert tokens[0][0] == tokens[1][0] - cut


BAD = {
    "logprobs.top_token_ids must have equally many numbers": lambda row: row.pop("logprobs"),
    "logprobs.top must have equally many numbers for each of": lambda row: row["logprobs"]["top"].pop(),
    "logprobs.top_token_ids and logprobs.top are not of one size": lambda row: row["logprobs"].update(
        top=[place[:3] for place in row["logprobs"]["top"]]
    ),
    "logprobs.top_token_ids must be token ids from 0": lambda row: row["logprobs"]["top_token_ids"][
        0
    ].__setitem__(0, 10**6),
    "names a token twice": lambda row: row["logprobs"]["top_token_ids"][0].__setitem__(
        0, row["logprobs"]["top_token_ids"][0][1]
    ),
    "are no logarithms of probabilities": lambda row: row["logprobs"]["top"][0].__setitem__(0, 0.5),
    "completion_token_ids must be token ids from 0": lambda row: row.update(completion_token_ids=["a"]),
    "its tokenizer is another": lambda row: row.update(completion="something else entirely"),
}


@pytest.mark.parametrize("message", BAD)
def test_a_row_that_does_not_say_what_its_teacher_held_is_named(
    folder: Path, tiny: Path, taught: Path, message: str
) -> None:
    lines = rows(taught)
    BAD[message](lines[2])
    with pytest.raises(InputError, match=message) as caught:
        tune_job(folder, tiny, data=write(taught, lines), **KL)
    assert str(caught.value).startswith(f"{taught}:3: ")
    assert not (folder / "home" / "adapters" / "student").exists()


def test_other_rows_have_no_teacher(folder: Path, tiny: Path) -> None:
    with pytest.raises(InputError, match="has plain rows, --loss kl learns from a teacher's") as caught:
        tune_job(folder, tiny, **KL)
    assert "spill distill TEACHER" in str(caught.value.hint)


def shallow(folder: Path, kept: tuple[int, ...]) -> Path:
    """The demo model with only some of its layers."""
    demo = resolve("demo").path
    folder.mkdir()
    for path in demo.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}))
    tensors: dict[str, torch.Tensor] = {}
    for path in demo.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            model, layers, number, *rest = [*name.split("."), "", ""][:4] + name.split(".")[4:]
            if layers != "layers":
                tensors[name] = tensor
            elif int(number) in kept:
                tensors[".".join((model, layers, str(kept.index(int(number))), *rest))] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.model
def test_a_teachers_distribution_teaches_more_than_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the demo model into four of its layers, the same rows and steps: the loss on rows held out."""
    student = shallow(tmp_path / "student", (0, 1, 28, 29))
    with shared("banking77", "train.csv").open(encoding="utf-8", newline="") as file:
        asked = [{"prompt": row["text"].strip()} for row in list(csv.DictReader(file))[::78]]
    options, nobody = JobOptions(runs=tmp_path / "runs", numerics="bf16"), Events("test", lambda _: None)
    for name, part in (("train", asked[:96]), ("held_out", asked[96:128])):
        out = tmp_path / f"{name}.taught.jsonl"
        settings = DistillSettings(
            "demo", write(tmp_path / f"{name}.jsonl", part), out, max_tokens=24, temperature=1.0, logprobs=64
        )
        run_rows(settings, options, nobody, JobFile("distill", {}, {}))
    held_out: dict[str, float] = {}
    for loss in ("text", "kl"):
        events: list[Any] = []
        settings = TuneSettings(
            *(str(student), tmp_path / "train.taught.jsonl", f"student-{loss}"),
            val=tmp_path / "held_out.taught.jsonl",
            loss=loss,
            epochs=3,
            lr=3e-3,
            batch=8,
            overwrite=True,
        )
        tune(settings, options, Events("test", events.append), JobFile("tune", {}, {}))
        held_out[loss] = [event["loss"] for event in events if event.get("stage") == "validation"][-1]
    with capsys.disabled():
        print(f"\nheld-out loss: {held_out['text']:.3f} from text, {held_out['kl']:.3f} from distributions")
    assert held_out["kl"] < held_out["text"] - 0.03
