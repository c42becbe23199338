"""What a program reads: JSON lines on stdout, text for people on stderr."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from cli.command import ROWS, SAVE_ROWS, SPILL, STEPS, TUNE, answers

COMMON = {"event", "time", "command", "step", "loss", "tokens_per_s", "peak_mem_gb", "eta_s", "engine"}


def test_every_line_on_stdout_is_an_event_with_the_common_keys(whole):
    for outcome, command in ((whole.tune, "tune"), (whole.run, "run")):
        assert outcome.code == 0
        assert all(event.keys() >= COMMON for event in outcome.events)
        assert {event["command"] for event in outcome.events} == {command}
        assert all(event["peak_mem_gb"] > 0 for event in outcome.events)
        assert abs(outcome.events[0]["time"] - outcome.events[-1]["time"]) < 600


def test_a_tune_tells_every_step_between_start_and_done(whole):
    kinds = [kind for kind in whole.tune.kinds if kind != "stage"]
    assert (kinds[0], kinds[-1]) == ("start", "done")
    assert set(kinds[1:-1]) == {"step", "checkpoint"}
    steps = whole.tune.of("step")
    assert [event["step"] for event in steps] == [*range(1, STEPS + 1)]
    assert all(event["total"] == STEPS and event["engine"] == "torch" for event in steps)
    assert all(event["loss"] > 0 and event["tokens_per_s"] > 0 and event["eta_s"] >= 0 for event in steps)
    assert [event["step"] for event in whole.tune.of("checkpoint")] == [*range(3, STEPS, 3), STEPS]
    assert whole.tune.of("done")[0]["complete"] is True


def test_a_run_tells_every_row_once_between_start_and_done(whole):
    kinds = [kind for kind in whole.run.kinds if kind != "stage"]
    assert (kinds[0], kinds[-1]) == ("start", "done")
    assert set(kinds[1:-1]) == {"row", "checkpoint"}
    rows = whole.run.of("row")
    assert [event["step"] for event in rows] == [*range(1, ROWS + 1)]
    assert sorted(event["custom_id"] for event in rows) == [f"row-{n:06d}" for n in range(1, ROWS + 1)]
    assert len(whole.run.of("checkpoint")) == ROWS // SAVE_ROWS
    ids = [line["custom_id"] for line in answers(whole.shell.run_folder("run") / "results.jsonl")]
    assert ids == [f"row-{n:06d}" for n in range(1, ROWS + 1)]


def test_text_on_stderr_says_what_it_will_cost_where_it_goes_and_what_to_type_next(whole):
    lines = whole.tune.err.splitlines()
    [before] = [line for line in lines if line.startswith("tune tiny")]
    state = whole.shell.run_folder("tune") / "state"
    for part in ("resident on cpu in float32", f"{STEPS} steps of 2", "rank 4", f"state at {state}"):
        assert part in before
    assert lines[-2] == f"its course: spill report {whole.shell.run_folder('tune').name}"
    assert lines[-3].startswith(f"done at step {STEPS} of {STEPS}, final loss ")
    assert lines[-1] == "next: spill run tiny+tiny sample"
    assert not any(line.startswith("{") for line in lines)
    lines = whole.run.err.splitlines()
    [before] = [line for line in lines if line.startswith("run tiny")]
    assert f"{ROWS} rows, 4 at a time" in before
    assert lines[-2] == f"its course: spill report {whole.shell.run_folder('run').name}"
    assert lines[-3].startswith(f"done: {ROWS} of {ROWS} rows; ")


def test_the_events_are_kept_in_the_run_folder(whole):
    for command, outcome in (("tune", whole.tune), ("run", whole.run)):
        path = whole.shell.run_folder(command) / "events.jsonl"
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert kept == outcome.events[-len(kept) :]
        assert {event["event"] for event in outcome.events[: -len(kept)]} <= {"stage", "start"}


def test_an_error_is_an_event_too(shell):
    outcome = shell("run", "tiny+absent", "prompts.jsonl")
    assert outcome.code == 1
    event = outcome.events[-1]
    assert event.keys() >= COMMON
    assert (event["event"], event["message"]) == ("error", "there is no adapter 'absent'")
    assert event["hint"] == "spill adapters"


def test_a_log_reader_that_leaves_does_not_end_the_work(shell, whole):
    words = [SPILL, *TUNE]
    process = subprocess.Popen(
        words,
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    text = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert "Traceback" not in text
    assert f"done at step {STEPS}" in text
    assert shell.losses() == whole.shell.losses()


@pytest.mark.parametrize("words", [("runs",), ("models",), ("status", "--json"), ("tail", "-n", "1000")])
def test_a_pipe_that_is_closed_early_is_no_complaint(whole, words):
    reader, writer = os.pipe()
    os.close(reader)
    shell = whole.shell
    try:
        done = subprocess.run(
            [SPILL, *words], cwd=shell.folder, env=shell.environment, stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (0, 1)
