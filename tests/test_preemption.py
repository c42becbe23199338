"""A scheduler takes the machine away from a real model: exit 75 in time, and nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import banking77
from spillover.state import State
from spillover.store import open_store

SPILL = Path(sys.executable).with_name("spill")
LIMIT = 30.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [str(SPILL), *arguments, "--headless", "--quiet"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str], kind: str, count: int) -> Iterator[dict[str, Any]]:
    """Events up to the ``count``-th of ``kind``."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        count -= event["event"] == kind
        yield event
        if count == 0:
            return
    raise AssertionError(process.stderr.read() if process.stderr else "")


def stopped(process: subprocess.Popen[str]) -> tuple[float, list[dict[str, Any]]]:
    """Send SIGTERM; the seconds until the process has ended, and what it said last."""
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=2 * LIMIT)
    return time.monotonic() - before, [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
@pytest.mark.model
def test_sigterm_in_tune_and_in_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, _ = banking77.write(tmp_path)
    state = str(tmp_path / "state")
    command = [
        "tune",
        "demo",
        str(train),
        "--name",
        "preempted",
        "--steps",
        "40",
        "--state",
        state,
        "--overwrite",
    ]
    process = start(tmp_path, *command)
    done = [event["step"] for event in heard(process, "step", 2) if event["event"] == "step"]
    seconds, rest = stopped(process)
    assert process.returncode == 75
    assert rest[-1]["event"] == "preempted"
    done += [event["step"] for event in rest if event["event"] == "step"]
    document = State(open_store(state)).read()
    assert document is not None
    assert document.status == "idle"
    assert document.current["ckpt"].step == done[-1]
    process = start(tmp_path, *command)
    again = [event["step"] for event in heard(process, "step", 1) if event["event"] == "step"]
    stopped(process)
    assert again == [done[-1] + 1]
    rows = tmp_path / "long.jsonl"
    rows.write_text('{"prompt": "Tell me a long story about the sea.", "max_tokens": 400}\n' * 8)
    process = start(tmp_path, "run", "demo", str(rows), "--state", f"{state}-rows")
    [*heard(process, "start", 1)]
    time_of_run, rest = stopped(process)
    assert process.returncode == 75, rest
    with capsys.disabled():
        print(f"\nSIGTERM to exit 75: {seconds:.2f} s in tune, {time_of_run:.2f} s in run", flush=True)
    assert max(seconds, time_of_run) < LIMIT
