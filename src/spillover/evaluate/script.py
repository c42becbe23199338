"""Scores by a program of the user's: one JSON line in for each answer, one JSON line out.

In, on stdin: ``{"custom_id", "messages", "expected", "model", "sample", "answer"}``. Out, on stdout, in the
same order: a number, true or false, null for an answer that cannot be scored, or an object with one of these
as ``score``. The program runs once for all answers, with this Python, in the working folder; it may read all
its input before it writes, as stdin is a file.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from spillover.errors import StoreFull

__all__ = ["ScriptFault", "script_scores"]

LINE_LIMIT = 1 << 20
"""Bytes of the longest line that a program may write."""


class ScriptFault(Exception):
    """Raised when a program did not score an answer.

    Attributes:
        number: of the answer among those it was given, from 0.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.message = message


def script_scores(path: Path, answers: Iterable[bytes], timeout: float) -> Iterator[float]:
    """Yield the score of each answer, NaN for null.

    Args:
        answers: JSON objects without line feeds.
        timeout: seconds that the program may be silent while a score is due.

    Raises:
        ScriptFault: it crashed, was silent for too long, or wrote something that is no score.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as complaints:
        count = _written(given, answers)
        with _running(path, given, complaints) as process:
            yield from _scores(process, complaints, count, timeout)


def _written(given: IO[bytes], answers: Iterable[bytes]) -> int:
    """Put the answers where the program reads them; how many there are."""
    count = 0
    try:
        for answer in answers:
            given.write(answer + b"\n")
            count += 1
        given.seek(0)
    except OSError as error:
        with contextlib.suppress(OSError):  # what could not be written is not needed any more
            given.close()
        message = f"{tempfile.gettempdir()}: no room for what a script reads: {error.strerror}"
        raise StoreFull(message, hint="set TMPDIR") from None
    return count


@contextlib.contextmanager
def _running(path: Path, given: IO[bytes], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The program at work; it and all it started are gone afterwards."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=complaints,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _scores(
    process: subprocess.Popen[bytes], complaints: IO[bytes], count: int, timeout: float
) -> Iterator[float]:
    number = 0
    for line in _lines(process, timeout):
        if line is None:
            raise ScriptFault(min(number, count - 1), f"gave no score within {timeout:g} s")
        if number == count:
            raise ScriptFault(count - 1, "wrote more lines than it was given answers")
        yield _score(line, number)
        number += 1
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise ScriptFault(count - 1, f"did not end within {timeout:g} s after its last score") from None
    if code != 0 or number < count:
        raise ScriptFault(min(number, count - 1), f"ended with exit code {code}{_last(complaints)}")


def _lines(process: subprocess.Popen[bytes], timeout: float) -> Iterator[bytes | None]:
    """Lines as they come; None once none came for ``timeout`` seconds."""
    assert process.stdout is not None
    file = process.stdout.fileno()
    rest = b""
    due = time.monotonic() + timeout
    while True:
        ready, _, _ = select.select([file], [], [], max(0.0, due - time.monotonic()))
        if not ready:
            yield None
            return
        piece = os.read(file, 1 << 16)
        *whole, rest = (rest + piece).split(b"\n")
        if not piece and rest.strip():
            whole.append(rest)  # no final line feed
        yield from (line for line in whole if line.strip())
        if not piece:
            return
        if len(rest) > LINE_LIMIT:
            yield rest
            return
        if whole:
            due = time.monotonic() + timeout


def _score(line: bytes, number: int) -> float:
    try:
        value: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        value = ...
    if isinstance(value, dict):
        value = value.get("score", ...)
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):
            return float(value)
    shown = line.strip()[:60].decode(errors="replace")
    raise ScriptFault(number, f"wrote {shown!r}, which is no score")


def _last(complaints: IO[bytes]) -> str:
    """The last line that the program wrote to stderr."""
    complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - 4096))
    lines = complaints.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:200]}" if last else ""
