"""What a person sees and does at a terminal, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cli.command import PATIENCE, SPILL, STEPS, TUNE, Shell, same_tensors

CTRL_C = b"\x03"
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The terminal must be the child's controlling one, or Ctrl-C reaches nobody.
LOGIN = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A terminal of 200 columns with one command running in it."""

    def __init__(self, shell: Shell, *words: str) -> None:
        self._file, inside = pty.openpty()
        environment = shell.environment | {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
        self._child = subprocess.Popen(
            [sys.executable, "-c", LOGIN, SPILL, *words],
            cwd=shell.folder,
            env=environment,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        self._shown = b""

    @property
    def text(self) -> str:
        """Everything that was shown so far, without colours and cursor movements."""
        return ESCAPE.sub("", self._shown.decode(errors="replace")).replace("\r", "\n")

    def until(self, pattern: str) -> re.Match[str]:
        """Return once ``pattern`` was shown."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < end, f"{pattern!r} is not in {self.text}"
            assert self._read(), f"{pattern!r} is not in {self.text}"
        return found

    def press(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def press_until(self, keys: bytes, words: str) -> None:
        """Press ``keys`` every half second until ``words`` are shown."""
        while words not in self.text:
            self.press(keys)
            end = time.monotonic() + 0.5
            while words not in self.text and time.monotonic() < end:
                assert self._read(0.1), f"{words!r} is not in {self.text}"

    def end(self) -> int:
        """Read to the end and return the exit code."""
        while self._read():
            pass
        return self._child.wait(PATIENCE)

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        os.close(self._file)

    def _read(self, seconds: float = PATIENCE) -> bool:
        """Read what is shown within some time; False once the command has ended."""
        ready, _, _ = select.select([self._file], [], [], seconds)
        try:
            piece = os.read(self._file, 1 << 16) if ready else b""
        except OSError:  # EIO: nobody has the other end open any more
            return False
        self._shown += piece
        return bool(piece) or not ready


@contextmanager
def terminal(shell: Shell, *words: str) -> Iterator[Terminal]:
    opened = Terminal(shell, *words)
    try:
        yield opened
    finally:
        opened.close()


def test_progress_is_shown_and_one_ctrl_c_finishes_the_step_and_saves(shell, whole):
    with terminal(shell, *TUNE) as screen:
        screen.until(r"tune tiny \(0 MB\), resident on cpu in float32")
        screen.until(rf"\d+ of {STEPS} steps +[\d,]+ tokens/s +\d+ s left +\d\.\d GB")
        screen.until(r"loss +\d\.\d{4}  [▁▂▃▄▅▆▇█]+")
        screen.until(r"durable at \S+/ckpt/step-\d+-\S+, step \d+")
        screen.press(CTRL_C)
        assert screen.end() == 130
        ended = re.search(rf"interrupted at step (\d+) of {STEPS}; durable at", screen.text)
        assert ended is not None
        assert "next: the same command continues" in screen.text
        assert '{"event"' not in screen.text
        assert "Traceback" not in screen.text
    assert len(shell.losses()) == int(ended[1])
    outcome = shell(*TUNE)
    assert outcome.of("restore")[0]["step"] == int(ended[1])
    assert shell.losses() == whole.shell.losses()
    assert same_tensors(shell.adapter(), whole.shell.adapter())


@pytest.mark.slow
def test_a_second_ctrl_c_gives_the_step_up_at_once(shell):
    words = [*TUNE, "--steps", "3", "--ckpt-every", "1", "--grad-accum", "600"]
    with terminal(shell, *words) as screen:
        durable = int(screen.until(r"durable at \S+, step (\d+)")[1])
        screen.press_until(CTRL_C, "the unfinished step is given up")
        assert screen.end() == 130
        assert f"interrupted at step {durable} of 3; durable at" in screen.text
        assert "Traceback" not in screen.text
    before = shell.losses()
    assert len(before) == durable
    outcome = shell(*words)
    assert outcome.code == 0
    assert [event["step"] for event in outcome.of("step")] == [*range(durable + 1, 4)]
    assert shell.losses()[:durable] == before


@pytest.mark.slow
def test_rows_are_shown_as_rows_and_an_error_as_one_line(shell):
    with terminal(shell, "run", "tiny", "prompts.jsonl", "--batch", "1", "--numerics", "float32") as screen:
        screen.until(r"\d+ of 200 rows +[\d,]+ tokens/s")
        screen.until(r"durable at \S+, \d+ rows")
        assert screen.end() == 0
        assert "done: 200 of 200 rows; runs/" in screen.text
    with terminal(shell, "run", "tiny", "absent.jsonl") as screen:
        assert screen.end() == 1
        assert screen.text.strip().splitlines()[-1].startswith("spill: absent.jsonl: no such file. Try: ")


def test_ctrl_c_before_the_work_begins_leaves_at_once(shell):
    with terminal(shell, *TUNE) as screen:
        screen.until("reading train.jsonl")
        screen.press(CTRL_C)
        assert screen.end() == 130
        assert "Traceback" not in screen.text
    assert not (shell.home / "adapters").exists()
