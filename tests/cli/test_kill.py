"""SIGKILL at moments that nobody chose: what comes out at the end is what an undisturbed process makes."""

from __future__ import annotations

import random
import signal

import pytest

from cli.command import ROWS, RUN, STEPS, TUNE, answers, same_tensors

KILLS = 8


@pytest.mark.slow
def test_a_tune_that_is_killed_again_and_again(shell, whole):
    moments = random.Random(1)
    wanted = {event["step"]: (event["loss"], event["rows"]) for event in whole.tune.of("step")}
    killed = 0
    while killed < KILLS:
        process = shell.start(*TUNE)
        process.until("step", moments.randint(0, 9))
        process.send(signal.SIGKILL)
        outcome = process.end()
        for event in outcome.of("step"):
            assert (event["loss"], event["rows"]) == wanted[event["step"]]
        if outcome.code == 0:
            break
        assert outcome.code == -signal.SIGKILL
        killed += 1
    assert shell(*TUNE).code == 0
    assert killed >= KILLS // 2
    assert shell.losses() == whole.shell.losses()
    assert len(shell.losses()) == STEPS
    assert same_tensors(shell.adapter(), whole.shell.adapter())


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(shell, whole):
    moments = random.Random(2)
    killed = 0
    while killed < KILLS:
        process = shell.start(*RUN)
        process.until("row", moments.randint(0, 60))
        process.send(signal.SIGKILL)
        if process.end().code == 0:
            break
        killed += 1
    last = shell(*RUN)
    assert last.code == 0
    assert killed >= KILLS // 2
    results = answers(shell.run_folder("run") / "results.jsonl")
    assert len(results) == ROWS
    assert results == answers(whole.shell.run_folder("run") / "results.jsonl")
