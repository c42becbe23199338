"""How jobs end: preempted, fenced off, refused, told to a URL. Whatever it is, the same command continues."""

from __future__ import annotations

import signal
import socket

import pytest

from cli.command import ROWS, RUN, STEPS, TUNE, answers, same_tensors


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_preempted_tune_saves_and_exits_75(shell, whole, number):
    process = shell.start(*TUNE)
    process.until("step")
    follower = shell.start("tail", "--follow", "-n", "1000")
    process.until("step", 5)
    process.send(number)
    first, followed = process.end(), follower.end()
    assert first.code == 75
    assert first.kinds[-1] == "preempted"
    lines = [line.split(maxsplit=1)[1] for line in followed.out.splitlines()]
    assert sum(line.startswith("step ") for line in lines) == len(first.of("step"))
    assert lines[-1].startswith("preempted  preempted at step ")
    done = first.of("step")[-1]["step"]
    assert first.of("checkpoint")[-1]["step"] == done < STEPS
    assert len(shell.losses()) == done
    second = shell(*TUNE)
    assert second.code == 0
    assert [event["step"] for event in first.of("step") + second.of("step")] == [*range(1, STEPS + 1)]
    assert shell.losses() == whole.shell.losses()
    assert same_tensors(shell.adapter(), whole.shell.adapter())


def test_a_preempted_run_saves_and_exits_75(shell, whole):
    process = shell.start(*RUN)
    process.until("row", 30)
    process.send(signal.SIGTERM)
    first = process.end()
    assert first.code == 75
    assert first.kinds[-1] == "preempted"
    second = shell(*RUN)
    assert second.code == 0
    seen = [event["custom_id"] for event in first.of("row") + second.of("row")]
    assert sorted(seen) == [f"row-{n:06d}" for n in range(1, ROWS + 1)]
    wanted = answers(whole.shell.run_folder("run") / "results.jsonl")
    assert answers(shell.run_folder("run") / "results.jsonl") == wanted


def test_an_owner_stops_when_it_is_asked_to(shell):
    command = ["tune", "tiny", "train.jsonl", "--name", "asked", "--steps", "100000", "--state", "state"]
    process = shell.start(*command)
    process.until("step", 3)
    asked = shell("stop", "state", "--reason", "the machine is needed")
    assert asked.code == 0
    assert asked.out.startswith("asked: the owner of state stops")
    first = process.end()
    assert first.code == 0
    assert first.kinds[-1] == "done"
    assert "stopped on purpose at step" in first.err
    assert "idle" in shell("status", "state").out
    refused = shell("stop", "state")
    assert refused.code == 1
    assert "nothing is running here" in refused.err


def test_preempted_before_the_work_begins_is_preempted_all_the_same(shell):
    process = shell.start(*TUNE)
    process.until("stage")  # the model's files are read, torch is not even imported
    process.send(signal.SIGTERM)
    outcome = process.end()
    assert outcome.code == 75
    assert outcome.kinds[-1] == "preempted"
    assert "Traceback" not in outcome.err


def test_of_two_processes_one_works_and_the_other_says_who(shell):
    words = [*TUNE, "--grad-accum", "16", "--steps", "20"]
    processes = [shell.start(*words) for _ in range(2)]
    outcomes = [process.end() for process in processes]
    loser, winner = sorted(outcomes, key=lambda outcome: -outcome.code)
    assert (loser.code, winner.code) == (1, 0)
    owner = processes[outcomes.index(winner)].child.pid
    line = loser.err.splitlines()[-1]
    assert line.startswith(
        f"spill: this work is owned by process {owner} on {socket.gethostname()}, which is alive"
    )
    assert "--takeover" in line
    assert loser.kinds[-1] == "error"
    assert loser.of("step") == []
    assert [event["step"] for event in winner.of("step")] == [*range(1, 21)]
    assert shell.losses() == [event["loss"] for event in winner.of("step")]


@pytest.mark.slow
def test_takeover_fences_the_owner_off_and_no_step_is_counted_twice(shell):
    words = [*TUNE, "--grad-accum", "40"]
    owner = shell.start(*words)
    owner.until("checkpoint")
    assert f"owner: process {owner.child.pid} on {socket.gethostname()}" in shell("status").out.splitlines()
    other = shell(*words, "--takeover", "--stop-after", "2")
    fenced = owner.end()
    assert other.code == 0
    assert fenced.code == 1
    line = fenced.err.splitlines()[-1]
    assert line.startswith("spill: ")
    assert "generation 2" in line
    assert fenced.kinds[-1] == "error"
    losses = shell.losses()
    assert len(losses) == other.of("step")[-1]["step"] == other.of("restore")[0]["step"] + 2
    told = {event["step"]: event["loss"] for event in fenced.of("step") + other.of("step")}
    assert losses == [told[step] for step in range(1, len(losses) + 1)]


def test_the_end_is_told_to_a_url(whole):
    assert {kind for kind, _ in whole.posted} == {"application/json"}
    told = {document["run"]: document["message"] for _, document in whole.posted}
    assert told == {
        outcome.of("done")[0]["run"]: outcome.of("done")[0]["message"] for outcome in (whole.tune, whole.run)
    }


def test_a_url_that_does_not_answer_fails_nothing(whole):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    outcome = whole.shell(*RUN, "--notify", url)
    assert outcome.code == 0
    assert outcome.err.splitlines()[0].startswith(f"could not notify {url}: ")
    assert f"already complete: {ROWS} of {ROWS} rows" in outcome.err
