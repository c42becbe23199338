"""A disk that really fills up: one clear line, everything durable intact, and with room the work goes on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import ROWS, RUN, STEPS, TUNE, Outcome, answers, current, same_tensors, tree

pytestmark = pytest.mark.slow


class Disk:
    """A file system of 4 MB in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"these tests must be allowed to mount a tmpfs: {done.stderr.strip()}"

    @property
    def ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self, leaving: int) -> None:
        """Write ballast until only ``leaving`` bytes are free."""
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            file.truncate(file.tell() - leaving)

    def make_room(self) -> None:
        self.ballast.unlink()

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def told(outcome: Outcome) -> str:
    """The one line that says what went wrong."""
    assert outcome.code == 1
    lines = [line for line in outcome.err.splitlines() if line.startswith("spill: ")]
    assert [lines[-1]] == lines == outcome.err.splitlines()[-1:]
    assert "Traceback" not in outcome.err
    assert outcome.kinds[-1] == "error"
    assert "no space left" in lines[0].lower()
    return lines[0]


def test_a_tune_whose_state_is_on_a_full_disk(shell, whole, disk):
    state = disk.folder / "state"
    words = [*TUNE, "--state", str(state)]
    assert shell(*words, "--stop-after", "7").code == 0
    before = tree(state / "ckpt")
    disk.fill(leaving=20 << 10)  # enough for the control object, too little for a checkpoint
    outcome = shell(*words)
    assert "Try: free some space and run the same command again" in told(outcome)
    assert outcome.of("checkpoint") == []
    assert shell.losses(state) == whole.shell.losses()[:7]
    assert before.items() <= tree(state / "ckpt").items()
    disk.make_room()
    outcome = shell(*words)
    assert outcome.code == 0
    assert [event["step"] for event in outcome.of("step")] == [*range(8, STEPS + 1)]
    assert shell.losses(state) == whole.shell.losses()
    assert same_tensors(shell.adapter(), whole.shell.adapter())


def test_a_run_whose_state_is_on_a_full_disk(shell, whole, disk):
    state = disk.folder / "state"
    words = [*RUN, "--state", str(state)]
    assert shell(*words, "--stop-after", "30").code == 0
    before = current(state, "rows").read("results.jsonl")
    disk.fill(leaving=12 << 10)
    assert "Try: free some space and run the same command again" in told(shell(*words))
    assert current(state, "rows").read("results.jsonl") == before
    disk.make_room()
    assert shell(*words).code == 0
    results = answers(shell.run_folder("run") / "results.jsonl")
    assert results == answers(whole.shell.run_folder("run") / "results.jsonl")


@pytest.mark.parametrize("leaving", [0, 16 << 10])
def test_a_run_folder_on_a_full_disk(shell, whole, disk, tmp_path, leaving):
    """With nothing left the run cannot be recorded; with a little its results cannot be written."""
    state = str(tmp_path / "state")
    (disk.folder / "runs").mkdir()
    (shell.folder / "runs").symlink_to(disk.folder / "runs")
    disk.fill(leaving)
    told(shell(*RUN, "--state", state))
    disk.make_room()
    outcome = shell(*RUN, "--state", state)
    assert outcome.code == 0
    results = answers(shell.run_folder("run") / "results.jsonl")
    assert len(results) == ROWS
    assert results == answers(whole.shell.run_folder("run") / "results.jsonl")
    assert not [name for name in os.listdir(shell.run_folder("run")) if name.startswith(".tmp-")]


def test_a_home_that_is_full_keeps_the_training_and_installs_the_adapter_later(shell, whole, disk):
    shell.home = disk.folder / "home"
    shell.home.mkdir()
    disk.fill(leaving=40 << 10)
    outcome = shell(*TUNE)
    assert "SPILL_HOME" in told(outcome)
    assert len(outcome.of("step")) == STEPS
    assert not (shell.home / "adapters" / "tiny").exists()
    disk.make_room()
    outcome = shell(*TUNE)
    assert outcome.code == 0
    assert outcome.of("step") == []
    assert same_tensors(shell.adapter(), whole.shell.adapter())
